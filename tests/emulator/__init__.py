"""A GPU emulated in numpy: it runs what nvcc made of the kernels, and checks every access.

`cubin` takes kernels out of a library, `sass` decodes instructions, `machine` executes a launch,
`device` makes a GPU of them that the library's own host code launches on.
"""
