// The arguments of every operator: one table from which come the torch schema, the checks of a call, and (through
// Python) the checks of a traced call.
#pragma once

#include <string>
#include <vector>

namespace specmeta {

enum class ArgKind { kTensor, kInt, kBool };
enum class DType { kInt32, kInt64, kEither };  // kEither: int32 or int64

// A dimension of a shape such as "B+1": its symbol (or '1') and what is added to it.
struct Dim {
  char symbol;
  int plus;
};

struct ArgSpec {
  std::string name;
  ArgKind kind = ArgKind::kTensor;
  bool required = false;
  bool written = false;  // an output, or updated in place
  DType dtype = DType::kInt32;
  std::string shape;            // one symbol a dimension, "+1" may follow, separated by commas: "B+1" or "S,P"
  std::vector<Dim> dims;        // the same, parsed
  std::string default_value;    // of an int or a bool, as the schema writes it
  long long low = 0, high = 0;  // limits of an int
};

struct OpSpec {
  std::string name;
  std::vector<ArgSpec> args;

  std::string schema() const;
};

// Every operator, in the order in which the headers explain them.
const std::vector<OpSpec>& op_specs();

}  // namespace specmeta
