/*
 * The operations without torch and Python: plain C (C99) and C++. Link with libspecmeta_c.so.
 *
 *     specmeta_advance_args args = specmeta_advance_init();
 *     args.seq_lens = specmeta_array(seq_lens, SPECMETA_INT32, rows);
 *     args.page_size = 32;
 *     char error[SPECMETA_ERROR_SIZE];
 *     if (specmeta_advance(&args, device, stream, error, sizeof error) != SPECMETA_OK) puts(error);
 *
 * Meaning, limits and rules are in docs/contract.md; the docstrings of specmeta/ops.py explain each argument, which
 * has the same name there.
 */
#ifndef SPECMETA_H
#define SPECMETA_H

#include <stdint.h>
#include <string.h>

#define SPECMETA_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#define SPECMETA_NOEXCEPT noexcept
#else
#define SPECMETA_NOEXCEPT
#endif

/* Raised when a struct or a meaning changes: a library refuses the structs of another version. */
#define SPECMETA_ABI_VERSION 2

/* What a call returns; what was wrong is in `error`. Nothing has been written or launched then. */
enum {
  SPECMETA_OK = 0,
  SPECMETA_INVALID_ARGUMENT = 1,
  SPECMETA_CUDA_ERROR = 2, /* or a library built without CUDA */
  SPECMETA_INTERNAL_ERROR = 3
};

/* Room for any message; with less, messages are cut. */
#define SPECMETA_ERROR_SIZE 512

/* dtype of a tensor; 0 is a tensor that is not given. A bool is a byte. */
enum { SPECMETA_INT32 = 1, SPECMETA_INT64 = 2, SPECMETA_BOOL = 3 };

/* A device that is no GPU's number. */
#define SPECMETA_CPU (-1)

/* An integer that is not given. */
#define SPECMETA_NONE INT64_MIN

/* Bits of `status`, which tell wrong values (contract, rule 5). */
enum {
  SPECMETA_STATUS_OVERFLOW = 1,
  SPECMETA_STATUS_UNDERFLOW = 2,
  SPECMETA_STATUS_BAD_COUNT = 4,
  SPECMETA_STATUS_BAD_SLOT = 8,
  SPECMETA_STATUS_BAD_PAGE = 16,
  SPECMETA_STATUS_BAD_INDPTR = 32
};

/* One or two dimensions of the caller's memory. Rows of a matrix may have any distance; all else is contiguous. */
typedef struct specmeta_tensor {
  void* data;
  int32_t dtype;
  int32_t rank;
  int64_t shape[2];
  int64_t strides[2]; /* in elements */
} specmeta_tensor;

static inline specmeta_tensor specmeta_matrix(const void* data, int32_t dtype, int64_t rows, int64_t columns,
                                              int64_t row_stride) {
  specmeta_tensor tensor;
  tensor.data = (void*)data; /* written only where the argument says so */
  tensor.dtype = dtype;
  tensor.rank = 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  tensor.strides[0] = row_stride;
  tensor.strides[1] = 1;
  return tensor;
}

static inline specmeta_tensor specmeta_array(const void* data, int32_t dtype, int64_t size) {
  specmeta_tensor tensor = specmeta_matrix(data, dtype, size, 0, 1);
  tensor.rank = 1;
  return tensor;
}

/*
 * How many int64 a workspace has through which the blocks of a launch on a GPU share its work: on a boundary of 32
 * bytes, zero before its first launch, and left so by each. One for each stream. `num_steps` is 1, but for
 * draft_lists. -1: rows or num_steps is out of range.
 */
SPECMETA_API int64_t specmeta_workspace_size(int64_t rows, int64_t num_steps) SPECMETA_NOEXCEPT;

/*
 * For each operation: its arguments, their defaults, and the call. On a GPU a call is one launch on `stream`, a
 * cudaStream_t of that device (0: the default one); it waits for nothing, and may be captured. On the CPU it has
 * returned when all is written. `error` may be null. Calls may run on several threads at once.
 */

/* From here on written by tools/write_c_header.py from the library's table: do not edit. */

/* Fast-forward or rewind rows that were staged before num_accepted was known. */
typedef struct specmeta_advance_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor seq_lens; /* int32 or int64 [B], required, written */
  int64_t page_size; /* 1 to 2147483647, required */
  specmeta_tensor num_accepted; /* int32 or int64 [N] */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  specmeta_tensor cu_seqlens_q; /* int32 [B+1] */
  int64_t max_seq_len; /* 1 to 2147483647, or SPECMETA_NONE */
  specmeta_tensor page_table; /* int32 [S,P] */
  specmeta_tensor num_pages; /* int32 [S] */
  specmeta_tensor position_ids; /* int32 or int64 [T], written */
  specmeta_tensor slot_mapping; /* int64 [U], written */
  specmeta_tensor kv_indptr; /* int32 [B+1], written */
  specmeta_tensor kv_indices; /* int32 [C], written */
  specmeta_tensor last_page_len; /* int32 [B], written */
  specmeta_tensor block_table; /* int32 [B,M], written */
  specmeta_tensor cached_lens; /* int32 [B], written */
  specmeta_tensor padded_seq_lens; /* int32 or int64 [B], written */
  specmeta_tensor pages_per_seq; /* int32 [B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  specmeta_tensor alloc_pages; /* int32 [A] */
  specmeta_tensor alloc_indptr; /* int32 [S+1] */
  specmeta_tensor count_index; /* int32 or int64 [B] */
  int64_t max_accepted; /* from 0, or SPECMETA_NONE */
  specmeta_tensor seq_lens_out; /* int32 or int64 [B], written */
  specmeta_tensor position_ids_out; /* int32 or int64 [T], written */
  specmeta_tensor use_initial_states; /* bool [B], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t seq_len_bias; /* -1099511627776 to 1099511627776 */
  int64_t position_bias; /* -1099511627776 to 1099511627776 */
  int64_t pad_slot; /* any */
  int64_t pad_page; /* -2147483648 to 2147483647 */
  int64_t pad_seq_len; /* 0 to 1 */
} specmeta_advance_args;

static inline specmeta_advance_args specmeta_advance_init(void) {
  specmeta_advance_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.max_seq_len = SPECMETA_NONE;
  args.max_accepted = SPECMETA_NONE;
  args.num_rows_int = SPECMETA_NONE;
  args.pad_slot = -1;
  return args;
}

SPECMETA_API int specmeta_advance(const specmeta_advance_args* args, int32_t device, void* stream,
                                  char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Lay out the rows of a step from the state by slot: the first node of an iteration. */
typedef struct specmeta_stage_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor committed_lens; /* int32 [S], required */
  int64_t page_size; /* 1 to 2147483647, required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  int64_t max_seq_len; /* 1 to 2147483647, or SPECMETA_NONE */
  specmeta_tensor page_table; /* int32 [S,P] */
  specmeta_tensor num_pages; /* int32 [S] */
  specmeta_tensor limit_lens; /* int32 [S] */
  specmeta_tensor known_lens; /* int32 [S] */
  specmeta_tensor num_drafts; /* int32 [S] */
  specmeta_tensor query_lens; /* int32 [B] */
  specmeta_tensor tokens; /* int32 or int64 [S,L] */
  specmeta_tensor cu_seqlens_q; /* int32 [B+1], written */
  specmeta_tensor seq_lens; /* int32 or int64 [B], written */
  specmeta_tensor position_ids; /* int32 or int64 [T], written */
  specmeta_tensor input_ids; /* int32 or int64 [T], written */
  specmeta_tensor num_draft_tokens; /* int32 [B], written */
  specmeta_tensor slot_mapping; /* int64 [U], written */
  specmeta_tensor kv_indptr; /* int32 [B+1], written */
  specmeta_tensor kv_indices; /* int32 [C], written */
  specmeta_tensor last_page_len; /* int32 [B], written */
  specmeta_tensor block_table; /* int32 [B,M], written */
  specmeta_tensor cached_lens; /* int32 [B], written */
  specmeta_tensor padded_seq_lens; /* int32 or int64 [B], written */
  specmeta_tensor pages_per_seq; /* int32 [B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  specmeta_tensor alloc_pages; /* int32 [A] */
  specmeta_tensor alloc_indptr; /* int32 [S+1] */
  specmeta_tensor use_initial_states; /* bool [B], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_token; /* -2147483648 to 2147483647 */
  int64_t pad_slot; /* any */
  int64_t pad_page; /* -2147483648 to 2147483647 */
  int64_t pad_seq_len; /* 0 to 1 */
} specmeta_stage_args;

static inline specmeta_stage_args specmeta_stage_init(void) {
  specmeta_stage_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.max_seq_len = SPECMETA_NONE;
  args.num_rows_int = SPECMETA_NONE;
  args.pad_slot = -1;
  return args;
}

SPECMETA_API int specmeta_stage(const specmeta_stage_args* args, int32_t device, void* stream,
                                char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Accept the leading drafts that the target also chose, and commit them. */
typedef struct specmeta_accept_greedy_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor target_tokens; /* int32 or int64 [T], required */
  specmeta_tensor input_ids; /* int32 or int64 [T], required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  specmeta_tensor cu_seqlens_q; /* int32 [B+1] */
  specmeta_tensor num_draft_tokens; /* int32 [B] */
  specmeta_tensor position_ids; /* int32 or int64 [T] */
  specmeta_tensor seq_lens; /* int32 or int64 [B] */
  specmeta_tensor committed_lens; /* int32 [S], written */
  specmeta_tensor known_lens; /* int32 [S], written */
  specmeta_tensor tokens; /* int32 or int64 [S,L], written */
  specmeta_tensor num_drafts; /* int32 [S], written */
  specmeta_tensor num_accepted; /* int32 or int64 [B], written */
  specmeta_tensor num_rejected; /* int32 [B], written */
  specmeta_tensor next_tokens; /* int32 or int64 [B], written */
  specmeta_tensor token_indices; /* int32 or int64 [B], written */
  specmeta_tensor accepted_tokens; /* int32 or int64 [B,W], written */
  specmeta_tensor draft_input_ids; /* int32 or int64 [T], written */
  specmeta_tensor last_position_ids; /* int32 or int64 [B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  specmeta_tensor num_sampled; /* int32 or int64 [B], written */
  specmeta_tensor seq_lens_out; /* int32 or int64 [B], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_token; /* -2147483648 to 2147483647 */
} specmeta_accept_greedy_args;

static inline specmeta_accept_greedy_args specmeta_accept_greedy_init(void) {
  specmeta_accept_greedy_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.num_rows_int = SPECMETA_NONE;
  return args;
}

SPECMETA_API int specmeta_accept_greedy(const specmeta_accept_greedy_args* args, int32_t device, void* stream,
                                        char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Commit what a rejection sampler let through. */
typedef struct specmeta_accept_sampled_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor sampled_tokens; /* int32 or int64 [B,W], required */
  int64_t vocab_size; /* from 1, required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  specmeta_tensor input_ids; /* int32 or int64 [T] */
  specmeta_tensor cu_seqlens_q; /* int32 [B+1] */
  specmeta_tensor num_draft_tokens; /* int32 [B] */
  specmeta_tensor position_ids; /* int32 or int64 [T] */
  specmeta_tensor seq_lens; /* int32 or int64 [B] */
  specmeta_tensor committed_lens; /* int32 [S], written */
  specmeta_tensor known_lens; /* int32 [S], written */
  specmeta_tensor tokens; /* int32 or int64 [S,L], written */
  specmeta_tensor num_drafts; /* int32 [S], written */
  specmeta_tensor num_accepted; /* int32 or int64 [B], written */
  specmeta_tensor num_rejected; /* int32 [B], written */
  specmeta_tensor next_tokens; /* int32 or int64 [B], written */
  specmeta_tensor token_indices; /* int32 or int64 [B], written */
  specmeta_tensor accepted_tokens; /* int32 or int64 [B,W], written */
  specmeta_tensor draft_input_ids; /* int32 or int64 [T], written */
  specmeta_tensor last_position_ids; /* int32 or int64 [B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  specmeta_tensor num_sampled; /* int32 or int64 [B], written */
  specmeta_tensor seq_lens_out; /* int32 or int64 [B], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_token; /* -2147483648 to 2147483647 */
} specmeta_accept_sampled_args;

static inline specmeta_accept_sampled_args specmeta_accept_sampled_init(void) {
  specmeta_accept_sampled_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.num_rows_int = SPECMETA_NONE;
  return args;
}

SPECMETA_API int specmeta_accept_sampled(const specmeta_accept_sampled_args* args, int32_t device, void* stream,
                                         char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Count the ids that a sampler left in each row, and take the last one. */
typedef struct specmeta_count_sampled_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor sampled_tokens; /* int32 or int64 [B,W], required */
  int64_t vocab_size; /* from 1, required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  specmeta_tensor discarded; /* bool [B] */
  specmeta_tensor backup_tokens; /* int32 or int64 [B] */
  specmeta_tensor num_sampled; /* int32 or int64 [B], written */
  specmeta_tensor next_tokens; /* int32 or int64 [B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_token; /* -2147483648 to 2147483647 */
} specmeta_count_sampled_args;

static inline specmeta_count_sampled_args specmeta_count_sampled_init(void) {
  specmeta_count_sampled_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.num_rows_int = SPECMETA_NONE;
  return args;
}

SPECMETA_API int specmeta_count_sampled(const specmeta_count_sampled_args* args, int32_t device, void* stream,
                                        char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Find the query token that was accepted last, from the counts of count_sampled. */
typedef struct specmeta_locate_sampled_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor num_sampled; /* int32 or int64 [B], required */
  specmeta_tensor cu_num_draft_tokens; /* int32 [B], required */
  specmeta_tensor cu_seqlens_q; /* int32 [B+1], required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  specmeta_tensor num_rejected; /* int32 [B], written */
  specmeta_tensor token_indices; /* int32 [B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
} specmeta_locate_sampled_args;

static inline specmeta_locate_sampled_args specmeta_locate_sampled_init(void) {
  specmeta_locate_sampled_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.num_rows_int = SPECMETA_NONE;
  return args;
}

SPECMETA_API int specmeta_locate_sampled(const specmeta_locate_sampled_args* args, int32_t device, void* stream,
                                         char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Keep the last query token of each row, in place: rows of one token from then on. */
typedef struct specmeta_keep_last_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor cu_seqlens_q; /* int32 [B+1], required, written */
  specmeta_tensor seq_lens; /* int32 or int64 [B], required, written */
  specmeta_tensor num_rows; /* int32 [1] */
  specmeta_tensor input_ids; /* int32 or int64 [T], written */
  specmeta_tensor position_ids; /* int32 or int64 [T], written */
  specmeta_tensor query_lens; /* int32 [B], written */
  specmeta_tensor cached_lens; /* int32 [B], written */
  specmeta_tensor use_initial_states; /* bool [B], written */
  specmeta_tensor status; /* int32 [B], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_token; /* -2147483648 to 2147483647 */
} specmeta_keep_last_args;

static inline specmeta_keep_last_args specmeta_keep_last_init(void) {
  specmeta_keep_last_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.num_rows_int = SPECMETA_NONE;
  return args;
}

SPECMETA_API int specmeta_keep_last(const specmeta_keep_last_args* args, int32_t device, void* stream,
                                    char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Write the page lists of all draft steps at once. */
typedef struct specmeta_draft_lists_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor seq_lens; /* int32 or int64 [B], required */
  int64_t page_size; /* 1 to 2147483647, required */
  int64_t num_steps; /* 1 to 65535, required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  int64_t max_seq_len; /* 1 to 2147483647, or SPECMETA_NONE */
  specmeta_tensor page_table; /* int32 [S,P] */
  specmeta_tensor num_pages; /* int32 [S] */
  specmeta_tensor position_ids; /* int32 or int64 [B], written */
  specmeta_tensor slot_mapping; /* int64 [T], written */
  specmeta_tensor kv_indptr; /* int32 [K,B+1], written */
  specmeta_tensor kv_indices; /* int32 [K,C], written */
  specmeta_tensor last_page_len; /* int32 [K,B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  specmeta_tensor alloc_pages; /* int32 [A] */
  specmeta_tensor alloc_indptr; /* int32 [S+1] */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_slot; /* any */
  int64_t pad_page; /* -2147483648 to 2147483647 */
  int64_t pad_seq_len; /* 0 to 1 */
} specmeta_draft_lists_args;

static inline specmeta_draft_lists_args specmeta_draft_lists_init(void) {
  specmeta_draft_lists_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.max_seq_len = SPECMETA_NONE;
  args.num_rows_int = SPECMETA_NONE;
  args.pad_slot = -1;
  return args;
}

SPECMETA_API int specmeta_draft_lists(const specmeta_draft_lists_args* args, int32_t device, void* stream,
                                      char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Say where the KV of each token goes, from its position. */
typedef struct specmeta_map_slots_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor position_ids; /* int32 or int64 [T], required */
  specmeta_tensor slot_mapping; /* int64 [U], required, written */
  int64_t page_size; /* 1 to 2147483647, required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  specmeta_tensor cu_seqlens_q; /* int32 [B+1] */
  int64_t max_seq_len; /* 1 to 2147483647, or SPECMETA_NONE */
  specmeta_tensor page_table; /* int32 [S,P] */
  specmeta_tensor num_pages; /* int32 [S] */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  specmeta_tensor alloc_pages; /* int32 [A] */
  specmeta_tensor alloc_indptr; /* int32 [S+1] */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_slot; /* any */
} specmeta_map_slots_args;

static inline specmeta_map_slots_args specmeta_map_slots_init(void) {
  specmeta_map_slots_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.max_seq_len = SPECMETA_NONE;
  args.num_rows_int = SPECMETA_NONE;
  args.pad_slot = -1;
  return args;
}

SPECMETA_API int specmeta_map_slots(const specmeta_map_slots_args* args, int32_t device, void* stream,
                                    char* error, size_t error_size) SPECMETA_NOEXCEPT;

/* Record draft k in the ledger and give each row the next position of the draft loop. */
typedef struct specmeta_draft_step_args {
  uint32_t struct_size;
  uint32_t abi_version;
  specmeta_tensor seq_lens; /* int32 or int64 [B], required, written */
  int64_t page_size; /* 1 to 2147483647, required */
  specmeta_tensor row_to_slot; /* int32 or int64 [B] */
  specmeta_tensor num_rows; /* int32 [1] */
  int64_t max_seq_len; /* 1 to 2147483647, or SPECMETA_NONE */
  specmeta_tensor page_table; /* int32 [S,P] */
  specmeta_tensor num_pages; /* int32 [S] */
  specmeta_tensor num_rejected; /* int32 [B] */
  specmeta_tensor draft_tokens; /* int32 or int64 [B] */
  int64_t draft_index; /* 0 to 2147483646 */
  int64_t shift; /* 0 to 1 */
  int64_t last; /* 0 or 1 */
  specmeta_tensor known_lens; /* int32 [S] */
  specmeta_tensor num_drafts; /* int32 [S], written */
  specmeta_tensor written_lens; /* int32 [S], written */
  specmeta_tensor tokens; /* int32 or int64 [S,L], written */
  specmeta_tensor position_ids; /* int32 or int64 [T], written */
  specmeta_tensor input_ids; /* int32 or int64 [T], written */
  specmeta_tensor slot_mapping; /* int64 [U], written */
  specmeta_tensor kv_indptr; /* int32 [B+1], written */
  specmeta_tensor kv_indices; /* int32 [C], written */
  specmeta_tensor last_page_len; /* int32 [B], written */
  specmeta_tensor block_table; /* int32 [B,M], written */
  specmeta_tensor cached_lens; /* int32 [B], written */
  specmeta_tensor padded_seq_lens; /* int32 or int64 [B], written */
  specmeta_tensor pages_per_seq; /* int32 [B], written */
  specmeta_tensor status; /* int32 [S+1, or B without row_to_slot], written */
  specmeta_tensor workspace; /* int64 [X], written */
  specmeta_tensor alloc_pages; /* int32 [A] */
  specmeta_tensor alloc_indptr; /* int32 [S+1] */
  int64_t max_rejected; /* from 0, or SPECMETA_NONE */
  specmeta_tensor seq_lens_out; /* int32 or int64 [B], written */
  specmeta_tensor position_ids_out; /* int32 or int64 [T], written */
  specmeta_tensor use_initial_states; /* bool [B], written */
  int64_t num_rows_int; /* any, or SPECMETA_NONE */
  int64_t pad_token; /* -2147483648 to 2147483647 */
  int64_t pad_slot; /* any */
  int64_t pad_page; /* -2147483648 to 2147483647 */
  int64_t pad_seq_len; /* 0 to 1 */
} specmeta_draft_step_args;

static inline specmeta_draft_step_args specmeta_draft_step_init(void) {
  specmeta_draft_step_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = (uint32_t)sizeof args;
  args.abi_version = SPECMETA_ABI_VERSION;
  args.max_seq_len = SPECMETA_NONE;
  args.shift = 1;
  args.max_rejected = SPECMETA_NONE;
  args.num_rows_int = SPECMETA_NONE;
  args.pad_slot = -1;
  return args;
}

SPECMETA_API int specmeta_draft_step(const specmeta_draft_step_args* args, int32_t device, void* stream,
                                     char* error, size_t error_size) SPECMETA_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif
