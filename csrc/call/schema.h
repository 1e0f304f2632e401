// The arguments of every operator: one table from which come the torch schema, the checks of a call (whoever makes
// it), and (through Python) the checks of a traced call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// The names of all operators' arguments: code that asks for another one does not compile.
// clang-format off
#define SPECMETA_ARGUMENTS(X) \
  X(accepted_tokens) X(alloc_indptr) X(alloc_pages) X(backup_tokens) X(block_table) X(cached_lens) X(committed_lens) \
  X(count_index) X(cu_num_draft_tokens) X(cu_seqlens_q) X(discarded) X(draft_index) X(draft_input_ids) \
  X(draft_tokens) X(input_ids) X(known_lens) X(kv_indices) X(kv_indptr) X(last) X(last_page_len) X(last_position_ids) \
  X(limit_lens) X(max_accepted) X(max_rejected) X(max_seq_len) X(next_tokens) X(num_accepted) X(num_draft_tokens) \
  X(num_drafts) X(num_pages) X(num_rejected) X(num_rows) X(num_rows_int) X(num_sampled) X(num_steps) X(pad_page) \
  X(pad_seq_len) X(pad_slot) X(pad_token) X(padded_seq_lens) X(page_size) X(page_table) X(pages_per_seq) \
  X(position_bias) X(position_ids) X(position_ids_out) X(query_lens) X(row_to_slot) X(sampled_tokens) X(seq_len_bias) \
  X(seq_lens) X(seq_lens_out) X(shift) X(slot_mapping) X(status) X(target_tokens) X(token_indices) X(tokens) \
  X(use_initial_states) X(vocab_size) X(workspace) X(written_lens)

// The names of all operators, in the order of op_specs().
#define SPECMETA_OPERATORS(X) \
  X(advance) X(stage) X(accept_greedy) X(accept_sampled) X(count_sampled) X(locate_sampled) X(keep_last) \
  X(draft_lists) X(map_slots) X(draft_step)
// clang-format on

namespace specmeta {

#define SPECMETA_NAME(name) name,
enum class Op : uint8_t { SPECMETA_OPERATORS(SPECMETA_NAME) kCount };
enum class Arg : uint8_t { SPECMETA_ARGUMENTS(SPECMETA_NAME) kCount };
#undef SPECMETA_NAME

const char* arg_name(Arg arg);

enum class ArgKind { kTensor, kInt, kBool };
enum class DType { kInt32, kInt64, kEither, kBool };  // kEither: int32 or int64

// A dimension of a shape such as "B+1": its symbol (or '1') and what is added to it.
struct Dim {
  char symbol;
  int plus;
};

struct ArgSpec {
  Arg name;
  ArgKind kind = ArgKind::kTensor;
  bool required = false;
  bool written = false;  // an output, or updated in place
  DType dtype = DType::kInt32;
  std::string shape;            // one symbol a dimension, "+1" may follow, separated by commas: "B+1" or "S,P"
  std::vector<Dim> dims;        // the same, parsed
  std::string default_value;    // of an int or a bool, as the schema writes it
  bool nullable = false;        // an int whose default is None
  long long low = 0, high = 0;  // limits of an int
};

inline constexpr size_t kMaxArgs = 48;  // of an operator
inline constexpr uint8_t kNoArgument = 255;

struct OpSpec {
  std::string name;
  std::vector<ArgSpec> args;
  std::array<uint8_t, static_cast<size_t>(Arg::kCount)> positions;  // of each name in args, or kNoArgument

  bool has(Arg name) const { return positions[static_cast<size_t>(name)] != kNoArgument; }
};

const std::vector<OpSpec>& op_specs();
inline const OpSpec& op_spec(Op op) {
  return op_specs()[static_cast<size_t>(op)];
}

// For the fake kernels and the tests: one line an argument, "operator name kind required written dtype shape default
// low high".
const std::string& schema_text();

}  // namespace specmeta
