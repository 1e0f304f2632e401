#include <torch/csrc/stable/library.h>

#include "../call/schema.h"

namespace {

std::string torch_schema(const specmeta::OpSpec& op) {
  std::string text = op.name + "(";
  char letter = 'a';
  for (const specmeta::ArgSpec& arg : op.args) {
    if (text.back() != '(') text += ", ";
    if (arg.kind == specmeta::ArgKind::kTensor) {
      text += "Tensor";
      if (arg.written) text += std::string("(") + letter++ + "!)";
      text += arg.required ? " " : "? ";
      text += specmeta::arg_name(arg.name);
      if (!arg.required) text += "=None";
    } else {
      text += arg.kind == specmeta::ArgKind::kBool ? "bool" : "SymInt";
      if (arg.nullable) text += "?";
      text += std::string(" ") + specmeta::arg_name(arg.name);
      if (!arg.required) text += "=" + arg.default_value;
    }
  }
  return text + ") -> ()";
}

}  // namespace

STABLE_TORCH_LIBRARY(specmeta, m) {
  for (const specmeta::OpSpec& op : specmeta::op_specs()) m.def(torch_schema(op).c_str());
}
