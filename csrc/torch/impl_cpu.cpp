#include "../cpu/run.h"
#include "kernels.h"

namespace {

struct Cpu {
  template <class Params>
  static void run(const Params& params, int32_t /*device_index*/) {
    specmeta::cpu::run(params);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specmeta, CPU, m) {
  specmeta::register_kernels<Cpu>(m);
}
