#include "schema.h"

#include <torch/csrc/stable/library.h>

#include "specmeta/common.h"

namespace specmeta {
namespace {

// The table of all arguments. A new one is also a field in specmeta/params.h, a line in from_arguments.cpp, and an
// argument of ops.py and reference.py; tests/test_errors.py holds these together.
//
// Shape symbols: B rows, S slots, Z status, T tokens, P pages a slot, A ragged pages, C kv_capacity, M block_table's
// width, L the ledger's width, W accepted_tokens' width (K + 1), N counts, X the workspace. Z is S + 1 with row_to_slot
// and B without.
constexpr DType kInt32 = DType::kInt32;
constexpr DType kInt64 = DType::kInt64;
constexpr DType kEither = DType::kEither;

ArgSpec tensor(const char* name, DType dtype, const char* shape, bool required, bool written) {
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
ArgSpec in(const char* name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, true, false);
}
ArgSpec opt(const char* name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, false, false);
}
ArgSpec inout(const char* name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, true, true);
}
// An output, or (the state by slot, the ledger) updated in place.
ArgSpec out(const char* name, DType dtype, const char* shape) {
  return tensor(name, dtype, shape, false, true);
}

ArgSpec integer(const char* name, const char* default_value, long long low, long long high) {
  ArgSpec spec;
  spec.name = name;
  spec.kind = ArgKind::kInt;
  spec.required = default_value == nullptr;
  if (default_value) spec.default_value = default_value;
  spec.low = low;
  spec.high = high;
  return spec;
}
ArgSpec boolean(const char* name, const char* default_value) {
  ArgSpec spec;
  spec.name = name;
  spec.kind = ArgKind::kBool;
  spec.default_value = default_value;
  return spec;
}

ArgSpec page_size() {
  return integer("page_size", nullptr, 1, kInt32Max);
}
ArgSpec pad_token() {
  return integer("pad_token", "0", -kInt32Max - 1, kInt32Max);
}

using Args = std::vector<ArgSpec>;

Args row_args() {
  return {
      opt("row_to_slot", kEither, "B"),
      opt("num_rows", kInt32, "1"),
      integer("num_rows_int", "None", INT64_MIN, INT64_MAX),
  };
}

Args page_args() {
  return {
      integer("max_seq_len", "None", 1, kInt32Max),
      opt("page_table", kInt32, "S,P"),
      opt("num_pages", kInt32, "S"),
      opt("alloc_pages", kInt32, "A"),
      opt("alloc_indptr", kInt32, "S+1"),
      integer("pad_page", "0", -kInt32Max - 1, kInt32Max),
      integer("pad_slot", "-1", INT64_MIN, INT64_MAX),
      integer("pad_seq_len", "0", 0, 1),
  };
}

Args layout_outputs() {
  return {
      out("cached_lens", kInt32, "B"),   out("padded_seq_lens", kEither, "B"), out("pages_per_seq", kInt32, "B"),
      out("last_page_len", kInt32, "B"), out("kv_indptr", kInt32, "B+1"),      out("kv_indices", kInt32, "C"),
      out("block_table", kInt32, "B,M"), out("slot_mapping", kInt64, "T"),     out("status", kInt32, "Z"),
      out("workspace", kInt64, "X"),
  };
}

Args accept_args() {
  return {
      opt("cu_seqlens_q", kInt32, "B+1"),
      opt("num_draft_tokens", kInt32, "B"),
      opt("position_ids", kEither, "T"),
      opt("seq_lens", kEither, "B"),
      pad_token(),
      out("committed_lens", kInt32, "S"),
      out("known_lens", kInt32, "S"),
      out("tokens", kEither, "S,L"),
      out("num_drafts", kInt32, "S"),
      out("num_accepted", kEither, "B"),
      out("num_rejected", kInt32, "B"),
      out("next_tokens", kEither, "B"),
      out("token_indices", kInt32, "B"),
      out("accepted_tokens", kEither, "B,W"),
      out("draft_input_ids", kEither, "T"),
      out("last_position_ids", kEither, "B"),
      out("status", kInt32, "Z"),
      out("workspace", kInt64, "X"),
  };
}

OpSpec make_op(const char* name, const std::vector<Args>& groups) {
  OpSpec op;
  op.name = name;
  for (const Args& group : groups) op.args.insert(op.args.end(), group.begin(), group.end());
  return op;
}

std::vector<OpSpec> make_ops() {
  return {
      make_op("advance",
              {
                  {in("num_accepted", kEither, "N"), inout("seq_lens", kEither, "B"), page_size()},
                  row_args(),
                  page_args(),
                  {
                      integer("max_accepted", "None", 0, INT64_MAX),
                      integer("seq_len_bias", "0", -kCountLimit, kCountLimit),
                      integer("position_bias", "0", -kCountLimit, kCountLimit),
                      opt("count_index", kInt32, "B"),
                      opt("cu_seqlens_q", kInt32, "B+1"),
                      out("position_ids", kEither, "T"),
                      out("seq_lens_out", kEither, "B"),
                      out("position_ids_out", kEither, "T"),
                  },
                  layout_outputs(),
              }),
      make_op("stage",
              {
                  {in("committed_lens", kInt32, "S"), page_size()},
                  row_args(),
                  page_args(),
                  {
                      pad_token(),
                      opt("limit_lens", kInt32, "S"),
                      opt("known_lens", kInt32, "S"),
                      opt("num_drafts", kInt32, "S"),
                      opt("query_lens", kInt32, "B"),
                      opt("tokens", kEither, "S,L"),
                      out("cu_seqlens_q", kInt32, "B+1"),
                      out("seq_lens", kEither, "B"),
                      out("position_ids", kEither, "T"),
                      out("input_ids", kEither, "T"),
                      out("num_draft_tokens", kInt32, "B"),
                  },
                  layout_outputs(),
              }),
      make_op("accept_greedy",
              {
                  {in("target_tokens", kEither, "T"), in("input_ids", kEither, "T")},
                  row_args(),
                  accept_args(),
              }),
      make_op("accept_sampled",
              {
                  {in("sampled_tokens", kEither, "B,W"), integer("vocab_size", nullptr, 1, INT64_MAX)},
                  row_args(),
                  {opt("input_ids", kEither, "T")},
                  accept_args(),
              }),
      make_op("draft_step",
              {
                  {inout("seq_lens", kEither, "B"), page_size()},
                  row_args(),
                  page_args(),
                  {
                      pad_token(),
                      opt("num_rejected", kInt32, "B"),
                      integer("max_rejected", "None", 0, INT64_MAX),
                      opt("draft_tokens", kEither, "B"),
                      integer("draft_index", "0", 0, kInt32Max - 1),
                      integer("shift", "1", 0, 1),
                      boolean("last", "False"),
                      opt("known_lens", kInt32, "S"),
                      out("num_drafts", kInt32, "S"),
                      out("written_lens", kInt32, "S"),
                      out("tokens", kEither, "S,L"),
                      out("position_ids", kEither, "T"),
                      out("seq_lens_out", kEither, "B"),
                      out("position_ids_out", kEither, "T"),
                      out("input_ids", kEither, "T"),
                  },
                  layout_outputs(),
              }),
  };
}

}  // namespace

std::string OpSpec::schema() const {
  std::string text = name + "(";
  char letter = 'a';
  for (const ArgSpec& arg : args) {
    if (text.back() != '(') text += ", ";
    if (arg.kind == ArgKind::kTensor) {
      text += "Tensor";
      if (arg.written) text += std::string("(") + letter++ + "!)";
      text += arg.required ? " " + arg.name : "? " + arg.name + "=None";
    } else {
      text += arg.kind == ArgKind::kBool ? "bool" : "SymInt";
      if (arg.default_value == "None") text += "?";
      text += " " + arg.name;
      if (!arg.required) text += "=" + arg.default_value;
    }
  }
  return text + ") -> ()";
}

const std::vector<OpSpec>& op_specs() {
  static const std::vector<OpSpec> specs = make_ops();
  return specs;
}

}  // namespace specmeta

STABLE_TORCH_LIBRARY(specmeta, m) {
  for (const specmeta::OpSpec& op : specmeta::op_specs()) m.def(op.schema().c_str());
}

// For the fake kernels and the tests: one line an argument, "operator name kind required written dtype shape default
// low high".
extern "C" __attribute__((visibility("default"))) const char* specmeta_schema() {
  static const std::string text = [] {
    static constexpr const char* kKinds[] = {"tensor", "int", "bool"};
    static constexpr const char* kDTypes[] = {"int32", "int64", "either"};
    std::string lines;
    for (const specmeta::OpSpec& op : specmeta::op_specs()) {
      for (const specmeta::ArgSpec& arg : op.args) {
        for (const std::string& word :
             {op.name, arg.name, std::string(kKinds[static_cast<int>(arg.kind)]), std::to_string(arg.required),
              std::to_string(arg.written), std::string(kDTypes[static_cast<int>(arg.dtype)]), arg.shape,
              arg.default_value, std::to_string(arg.low)}) {
          lines += word + "\t";
        }
        lines += std::to_string(arg.high) + "\n";
      }
    }
    return lines;
  }();
  return text.c_str();
}
