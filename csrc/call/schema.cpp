#include "schema.h"

#include <stdexcept>

#include "specmeta/common.h"

namespace specmeta {
namespace {

// The table of all arguments. A new one is also a name in schema.h, a field in specmeta/params.h, a line in
// from_arguments.cpp, and an argument of ops.py, in the same place, and reference.py; tests/test_errors.py holds these
// together. What is rarely given stands last: ops.py then leaves it out, since torch takes time for each argument.
//
// Shape symbols: B rows, S slots, Z status, T tokens, U slots of tokens (T or more), P pages a slot, A ragged pages, C
// kv_capacity, M block_table's width, L the ledger's width, W accepted_tokens' width, K draft steps, N counts, X the
// workspace. Z is S + 1 with row_to_slot and B without.
constexpr DType kInt32 = DType::kInt32;
constexpr DType kInt64 = DType::kInt64;
constexpr DType kEither = DType::kEither;
constexpr DType kBool = DType::kBool;

ArgSpec tensor(Arg name, DType dtype, const char* shape, bool required, bool written) {
  ArgSpec spec;
  spec.name = name;
  spec.dtype = dtype;
  spec.shape = shape;
  for (const char* c = shape; *c; ++c) {
    if (*c == '+') {
      spec.dims.back().plus = *++c - '0';
    } else if (*c != ',') {
      spec.dims.push_back({*c, 0});
    }
  }
  spec.required = required;
  spec.written = written;
  return spec;
}
ArgSpec in(Arg name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, true, false);
}
ArgSpec opt(Arg name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, false, false);
}
ArgSpec inout(Arg name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, true, true);
}
// An output, or (the state by slot, the ledger) updated in place.
ArgSpec out(Arg name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, false, true);
}

ArgSpec integer(Arg name, const char* default_value, long long low, long long high) {
  ArgSpec spec;
  spec.name = name;
  spec.kind = ArgKind::kInt;
  spec.required = default_value == nullptr;
  if (default_value) spec.default_value = default_value;
  spec.nullable = spec.default_value == "None";
  spec.low = low;
  spec.high = high;
  return spec;
}
ArgSpec boolean(Arg name, const char* default_value) {
  ArgSpec spec;
  spec.name = name;
  spec.kind = ArgKind::kBool;
  spec.default_value = default_value;
  return spec;
}

ArgSpec page_size() {
  return integer(Arg::page_size, nullptr, 1, kInt32Max);
}
ArgSpec pad_token() {
  return integer(Arg::pad_token, "0", -kInt32Max - 1, kInt32Max);
}

using Args = std::vector<ArgSpec>;

Args row_args() {
  return {opt(Arg::row_to_slot, kEither, "B"), opt(Arg::num_rows, kInt32, "1")};
}

ArgSpec num_rows_int() {
  return integer(Arg::num_rows_int, "None", INT64_MIN, INT64_MAX);
}

Args page_args() {
  return {
      integer(Arg::max_seq_len, "None", 1, kInt32Max),
      opt(Arg::page_table, kInt32, "S,P"),
      opt(Arg::num_pages, kInt32, "S"),
  };
}

Args ragged_page_args() {
  return {opt(Arg::alloc_pages, kInt32, "A"), opt(Arg::alloc_indptr, kInt32, "S+1")};
}

ArgSpec pad_slot() {
  return integer(Arg::pad_slot, "-1", INT64_MIN, INT64_MAX);
}

Args padding_args() {
  return {
      pad_slot(),
      integer(Arg::pad_page, "0", -kInt32Max - 1, kInt32Max),
      integer(Arg::pad_seq_len, "0", 0, 1),
  };
}

Args status_and_workspace() {
  return {out(Arg::status, kInt32, "Z"), out(Arg::workspace, kInt64, "X")};
}

Args layout_outputs() {
  return {
      out(Arg::slot_mapping, kInt64, "U"),     out(Arg::kv_indptr, kInt32, "B+1"),   out(Arg::kv_indices, kInt32, "C"),
      out(Arg::last_page_len, kInt32, "B"),    out(Arg::block_table, kInt32, "B,M"), out(Arg::cached_lens, kInt32, "B"),
      out(Arg::padded_seq_lens, kEither, "B"), out(Arg::pages_per_seq, kInt32, "B"),
  };
}

ArgSpec use_initial_states() {
  return out(Arg::use_initial_states, kBool, "B");
}

Args accept_args() {
  return {
      opt(Arg::cu_seqlens_q, kInt32, "B+1"),
      opt(Arg::num_draft_tokens, kInt32, "B"),
      opt(Arg::position_ids, kEither, "T"),
      opt(Arg::seq_lens, kEither, "B"),
      out(Arg::committed_lens, kInt32, "S"),
      out(Arg::known_lens, kInt32, "S"),
      out(Arg::tokens, kEither, "S,L"),
      out(Arg::num_drafts, kInt32, "S"),
      out(Arg::num_accepted, kEither, "B"),
      out(Arg::num_rejected, kInt32, "B"),
      out(Arg::next_tokens, kEither, "B"),
      out(Arg::token_indices, kEither, "B"),
      out(Arg::accepted_tokens, kEither, "B,W"),
      out(Arg::draft_input_ids, kEither, "T"),
      out(Arg::last_position_ids, kEither, "B"),
      out(Arg::status, kInt32, "Z"),
      out(Arg::workspace, kInt64, "X"),
      // rarely given
      out(Arg::num_sampled, kEither, "B"),
      out(Arg::seq_lens_out, kEither, "B"),
      num_rows_int(),
      pad_token(),
  };
}

OpSpec make_op(const char* name, const std::vector<Args>& groups) {
  OpSpec op;
  op.name = name;
  for (const Args& group : groups) op.args.insert(op.args.end(), group.begin(), group.end());
  if (op.args.size() > kMaxArgs) throw std::length_error(op.name + " has more than kMaxArgs arguments");
  op.positions.fill(kNoArgument);
  for (size_t i = 0; i < op.args.size(); ++i) op.positions[static_cast<size_t>(op.args[i].name)] = i;
  return op;
}

std::vector<OpSpec> make_ops() {
  return {
      make_op("advance",
              {
                  {inout(Arg::seq_lens, kEither, "B"), page_size(), opt(Arg::num_accepted, kEither, "N")},
                  row_args(),
                  {opt(Arg::cu_seqlens_q, kInt32, "B+1")},
                  page_args(),
                  {out(Arg::position_ids, kEither, "T")},
                  layout_outputs(),
                  status_and_workspace(),
                  // rarely given
                  ragged_page_args(),
                  {
                      opt(Arg::count_index, kEither, "B"),
                      integer(Arg::max_accepted, "None", 0, INT64_MAX),
                      out(Arg::seq_lens_out, kEither, "B"),
                      out(Arg::position_ids_out, kEither, "T"),
                      use_initial_states(),
                      num_rows_int(),
                      integer(Arg::seq_len_bias, "0", -kCountLimit, kCountLimit),
                      integer(Arg::position_bias, "0", -kCountLimit, kCountLimit),
                  },
                  padding_args(),
              }),
      make_op("stage",
              {
                  {in(Arg::committed_lens, kInt32, "S"), page_size()},
                  row_args(),
                  page_args(),
                  {
                      opt(Arg::limit_lens, kInt32, "S"),
                      opt(Arg::known_lens, kInt32, "S"),
                      opt(Arg::num_drafts, kInt32, "S"),
                      opt(Arg::query_lens, kInt32, "B"),
                      opt(Arg::tokens, kEither, "S,L"),
                      out(Arg::cu_seqlens_q, kInt32, "B+1"),
                      out(Arg::seq_lens, kEither, "B"),
                      out(Arg::position_ids, kEither, "T"),
                      out(Arg::input_ids, kEither, "T"),
                      out(Arg::num_draft_tokens, kInt32, "B"),
                  },
                  layout_outputs(),
                  status_and_workspace(),
                  // rarely given
                  ragged_page_args(),
                  {use_initial_states(), num_rows_int(), pad_token()},
                  padding_args(),
              }),
      make_op("accept_greedy",
              {
                  {in(Arg::target_tokens, kEither, "T"), in(Arg::input_ids, kEither, "T")},
                  row_args(),
                  accept_args(),
              }),
      make_op("accept_sampled",
              {
                  {in(Arg::sampled_tokens, kEither, "B,W"), integer(Arg::vocab_size, nullptr, 1, INT64_MAX)},
                  row_args(),
                  {opt(Arg::input_ids, kEither, "T")},
                  accept_args(),
              }),
      make_op("count_sampled",
              {
                  {in(Arg::sampled_tokens, kEither, "B,W"), integer(Arg::vocab_size, nullptr, 1, INT64_MAX)},
                  row_args(),
                  {
                      opt(Arg::discarded, kBool, "B"),
                      opt(Arg::backup_tokens, kEither, "B"),
                      out(Arg::num_sampled, kEither, "B"),
                      out(Arg::next_tokens, kEither, "B"),
                  },
                  status_and_workspace(),
                  {num_rows_int(), pad_token()},
              }),
      make_op("locate_sampled",
              {
                  {in(Arg::num_sampled, kEither, "B"), in(Arg::cu_num_draft_tokens, kInt32, "B"),
                   in(Arg::cu_seqlens_q, kInt32, "B+1")},
                  row_args(),
                  {out(Arg::num_rejected, kInt32, "B"), out(Arg::token_indices, kInt32, "B")},
                  status_and_workspace(),
                  {num_rows_int()},
              }),
      make_op("keep_last",
              {
                  {inout(Arg::cu_seqlens_q, kInt32, "B+1"), inout(Arg::seq_lens, kEither, "B")},
                  {
                      opt(Arg::num_rows, kInt32, "1"),
                      out(Arg::input_ids, kEither, "T"),
                      out(Arg::position_ids, kEither, "T"),
                      out(Arg::query_lens, kInt32, "B"),
                      out(Arg::cached_lens, kInt32, "B"),
                      use_initial_states(),
                      out(Arg::status, kInt32, "B"),
                      num_rows_int(),
                      pad_token(),
                  },
              }),
      make_op("draft_lists",
              {
                  {in(Arg::seq_lens, kEither, "B"), page_size(), integer(Arg::num_steps, nullptr, 1, kMaxSteps)},
                  row_args(),
                  page_args(),
                  {
                      out(Arg::position_ids, kEither, "B"),
                      out(Arg::slot_mapping, kInt64, "T"),
                      out(Arg::kv_indptr, kInt32, "K,B+1"),
                      out(Arg::kv_indices, kInt32, "K,C"),
                      out(Arg::last_page_len, kInt32, "K,B"),
                  },
                  status_and_workspace(),
                  // rarely given
                  ragged_page_args(),
                  {num_rows_int()},
                  padding_args(),
              }),
      make_op("map_slots",
              {
                  {in(Arg::position_ids, kEither, "T"), inout(Arg::slot_mapping, kInt64, "U"), page_size()},
                  row_args(),
                  {opt(Arg::cu_seqlens_q, kInt32, "B+1")},
                  page_args(),
                  status_and_workspace(),
                  // rarely given
                  ragged_page_args(),
                  {num_rows_int(), pad_slot()},
              }),
      make_op("draft_step",
              {
                  {inout(Arg::seq_lens, kEither, "B"), page_size()},
                  row_args(),
                  page_args(),
                  {
                      opt(Arg::num_rejected, kInt32, "B"),
                      opt(Arg::draft_tokens, kEither, "B"),
                      integer(Arg::draft_index, "0", 0, kInt32Max - 1),
                      integer(Arg::shift, "1", 0, 1),
                      boolean(Arg::last, "False"),
                      opt(Arg::known_lens, kInt32, "S"),
                      out(Arg::num_drafts, kInt32, "S"),
                      out(Arg::written_lens, kInt32, "S"),
                      out(Arg::tokens, kEither, "S,L"),
                      out(Arg::position_ids, kEither, "T"),
                      out(Arg::input_ids, kEither, "T"),
                  },
                  layout_outputs(),
                  status_and_workspace(),
                  // rarely given
                  ragged_page_args(),
                  {
                      integer(Arg::max_rejected, "None", 0, INT64_MAX),
                      out(Arg::seq_lens_out, kEither, "B"),
                      out(Arg::position_ids_out, kEither, "T"),
                      use_initial_states(),
                      num_rows_int(),
                      pad_token(),
                  },
                  padding_args(),
              }),
  };
}

}  // namespace

const char* arg_name(Arg arg) {
#define SPECMETA_NAME(name) #name,
  static constexpr const char* kNames[] = {SPECMETA_ARGUMENTS(SPECMETA_NAME)};
#undef SPECMETA_NAME
  return kNames[static_cast<size_t>(arg)];
}

const std::vector<OpSpec>& op_specs() {
  static const std::vector<OpSpec> specs = make_ops();
  return specs;
}

const std::string& schema_text() {
  static const std::string text = [] {
    static constexpr const char* kKinds[] = {"tensor", "int", "bool"};
    static constexpr const char* kDTypes[] = {"int32", "int64", "either", "bool"};
    std::string lines;
    for (const OpSpec& op : op_specs()) {
      for (const ArgSpec& arg : op.args) {
        for (const std::string& word : {op.name, std::string(arg_name(arg.name)),
                                        std::string(kKinds[static_cast<int>(arg.kind)]), std::to_string(arg.required),
                                        std::to_string(arg.written), std::string(kDTypes[static_cast<int>(arg.dtype)]),
                                        arg.shape, arg.default_value, std::to_string(arg.low)}) {
          lines += word + "\t";
        }
        lines += std::to_string(arg.high) + "\n";
      }
    }
    return lines;
  }();
  return text;
}

}  // namespace specmeta
