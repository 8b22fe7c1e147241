// The hooks of benchmarks/least.py in a compiled language: copies of a layer's inputs and errors
// when its errors come in, and probes of gradients, without the interpreter.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/extension.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

using torch::autograd::variable_list;

constexpr size_t SLOTS = 376;
constexpr int64_t ROWS = 128;  // of a high matrix

struct Slots {
  std::vector<std::vector<float>> keys{SLOTS}, values{SLOTS};
  size_t next = 0;
};

void put(std::vector<float>& slot, const at::Tensor& tensor) {
  slot.resize(tensor.numel());
  std::memcpy(slot.data(), tensor.const_data_ptr<float>(), tensor.nbytes());
}

struct Copy : torch::autograd::FunctionPreHook {
  at::Tensor input;
  std::shared_ptr<Slots> slots;

  Copy(at::Tensor input, std::shared_ptr<Slots> slots)
      : input(std::move(input)), slots(std::move(slots)) {}

  variable_list operator()(const variable_list& errors) override {
    if (slots) {
      const size_t at = slots->next++ % SLOTS;
      put(slots->keys[at], input);
      put(slots->values[at], errors[0]);
    }
    return errors;
  }
};

void see(std::shared_ptr<Slots> slots, const at::Tensor& input, const at::Tensor& output) {
  if (auto node = output.grad_fn()) node->add_pre_hook(std::make_unique<Copy>(input, slots));
}

// The sums of some rows of a matrix's gradient, and an offset's gradient as it is.
std::vector<float> probe(const std::vector<at::Tensor>& parameters) {
  std::vector<float> found;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.grad();
    const float* data = gradient.const_data_ptr<float>();
    const int64_t width = gradient.dim() == 2 ? gradient.size(1) : 1;
    const int64_t rows = width > 1 ? std::min<int64_t>(ROWS, gradient.size(0)) : gradient.numel();
    for (int64_t row = 0; row < rows; ++row) {
      float sum = 0;
      for (int64_t at = 0; at < width; ++at) sum += data[row * width + at];
      found.push_back(sum);
    }
  }
  return found;
}

struct Probes {
  std::vector<std::vector<float>> kept;
  void take(const std::vector<at::Tensor>& parameters) {
    if (kept.size() == SLOTS) kept.clear();
    kept.push_back(probe(parameters));
  }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<Slots, std::shared_ptr<Slots>>(m, "Slots").def(pybind11::init<>());
  pybind11::class_<Probes>(m, "Probes").def(pybind11::init<>()).def("take", &Probes::take);
  m.def("see", &see, pybind11::arg("slots").none(true), pybind11::arg("x"), pybind11::arg("out"));
}
