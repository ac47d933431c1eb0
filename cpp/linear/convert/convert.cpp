#include "metatomic_tc/convert.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include <fnmatch.h>

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include "product/plan.hpp"

namespace metatomic_tc {

namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

const auto stock_linear = c10::Symbol::fromQualString("aten::linear");
const auto our_linear = c10::Symbol::fromQualString("metatomic_tc::linear");
const auto our_linear_activation = c10::Symbol::fromQualString("metatomic_tc::linear_activation");

/// Its last input is the mode.
const auto our_attention = c10::Symbol::fromQualString("metatomic_tc::pet_attention");

bool is_linear(const Node *node) {
    return node->kind() == stock_linear || node->kind() == our_linear;
}

/// Linear layers and called free functions of one graph, nested blocks included.
struct GraphContent {
    /// `aten::linear` and `metatomic_tc::linear`.
    std::vector<Node *> linears;
    /// `metatomic_tc::linear_activation`.
    std::vector<Node *> fused;
    /// `metatomic_tc::pet_attention`.
    std::vector<Node *> attentions;
    /// Calls of methods of other modules.
    std::vector<Node *> method_calls;
    std::vector<torch::jit::Function *> functions;
};

/// The function that a `prim::CallFunction` or `prim::CallMethod` calls; nullptr for other nodes,
/// and where only the run decides.
torch::jit::Function *called_function(const Node *node) {
    if (node->kind() == c10::prim::CallFunction) {
        auto type = node->input(0)->type()->cast<c10::FunctionType>();
        return type == nullptr ? nullptr : type->function();
    }
    if (node->kind() == c10::prim::CallMethod) {
        auto type = node->input(0)->type()->cast<c10::ClassType>();
        return type == nullptr ? nullptr : type->findMethod(node->s(c10::attr::name));
    }
    return nullptr;
}

std::shared_ptr<Graph> graph_of(torch::jit::Function *function) {
    auto *graph_function =
        function == nullptr ? nullptr : torch::jit::tryToGraphFunction(*function);
    return graph_function == nullptr ? nullptr : graph_function->graph();
}

void collect(Block *block, GraphContent &content) {
    for (auto *node : block->nodes()) {
        if (is_linear(node)) {
            content.linears.push_back(node);
        } else if (node->kind() == our_linear_activation) {
            content.fused.push_back(node);
        } else if (node->kind() == our_attention) {
            content.attentions.push_back(node);
        } else if (node->kind() == c10::prim::CallMethod) {
            content.method_calls.push_back(node);
        } else if (node->kind() == c10::prim::CallFunction && called_function(node) != nullptr) {
            content.functions.push_back(called_function(node));
        }
        for (auto *inner : node->blocks()) {
            collect(inner, content);
        }
    }
}

GraphContent content_of(Graph &graph) {
    auto content = GraphContent();
    collect(graph.block(), content);
    return content;
}

/// The value of an attribute chain such as self.layer.weight, where `self` is the first input of
/// the graph; nothing when `value` is anything else. The names go to `path`.
std::optional<c10::IValue>
resolve(const Value *value, const Graph &graph, const torch::jit::Module &self, std::string &path) {
    if (!graph.inputs().empty() && value == graph.inputs()[0]) {
        return self._ivalue();
    }
    const auto *node = value->node();
    if (node->kind() != c10::prim::GetAttr) {
        return std::nullopt;
    }
    auto owner = resolve(node->input(), graph, self, path);
    if (!owner.has_value() || !owner->isObject()) {
        return std::nullopt;
    }
    const auto &name = node->s(c10::attr::name);
    if (!path.empty()) {
        path += '.';
    }
    path += name;
    return owner->toObject()->getAttr(name);
}

/// A method of one module, or a free function, that takes part in the conversion.
struct Code {
    std::shared_ptr<Graph> graph;
    /// Nothing for a free function.
    std::optional<torch::jit::Module> self;
    /// Of the module or the function.
    std::string name;
};

/// Every method of `module` and its submodules, and every function they call. Modules of one type
/// share their graphs.
std::vector<Code> code_of(const torch::jit::Module &module) {
    auto result = std::vector<Code>();
    auto seen = std::unordered_set<torch::jit::Function *>();
    auto pending = std::vector<torch::jit::Function *>();
    auto add = [&](const Code &code) {
        result.push_back(code);
        auto functions = content_of(*code.graph).functions;
        pending.insert(pending.end(), functions.begin(), functions.end());
    };
    for (const auto &named : module.named_modules()) {
        for (const auto &method : named.value.get_methods()) {
            add({method.graph(), named.value, named.name});
        }
    }
    while (!pending.empty()) {
        auto *function = pending.back();
        pending.pop_back();
        auto graph = graph_of(function);
        if (graph != nullptr && seen.insert(function).second) {
            add({graph, std::nullopt, function->qualname().qualifiedName()});
        }
    }
    return result;
}

// ---- activations ----

/// The node whose result `graph` returns, where all others are constants and attributes; nullptr
/// where there is more.
const Node *only_node(const Graph &graph) {
    const Node *result = nullptr;
    for (const auto *node : graph.nodes()) {
        if (node->kind() == c10::prim::Constant || node->kind() == c10::prim::GetAttr) {
            continue;
        }
        if (result != nullptr) {
            return nullptr;
        }
        result = node;
    }
    auto returned = result != nullptr && result->outputs().size() == 1 &&
                    graph.outputs().size() == 1 && graph.outputs()[0] == result->output();
    return returned ? result : nullptr;
}

/// Of a call `layer.forward(x)` the node in that method, where it is `linear(x, self.weight,
/// self.bias)` and nothing else, as in torch.nn.Linear; nullptr for other nodes.
const Node *linear_of_module(const Node *call) {
    auto graph = call->kind() == c10::prim::CallMethod ? graph_of(called_function(call)) : nullptr;
    if (graph == nullptr || graph->inputs().size() != 2 || call->inputs().size() != 2) {
        return nullptr;
    }
    const auto *node = only_node(*graph);
    auto is_attribute = [&](const Value *value, const char *name) {
        return value->node()->kind() == c10::prim::GetAttr &&
               value->node()->input() == graph->inputs()[0] &&
               value->node()->s(c10::attr::name) == name;
    };
    auto fits = node != nullptr && is_linear(node) && node->input(0) == graph->inputs()[1] &&
                is_attribute(node->input(1), "weight") &&
                (is_attribute(node->input(2), "bias") || node->input(2)->mustBeNone());
    return fits ? node : nullptr;
}

bool is_torch_function(const Node *call, const std::string &name) {
    auto type = call->input(0)->type()->cast<c10::FunctionType>();
    if (type == nullptr) {
        return false;
    }
    auto full = std::string();
    for (const auto &atom : type->function()->qualname().atoms()) {
        if (atom.rfind("___torch_mangle_", 0) != 0) {
            full += (full.empty() ? "" : ".") + atom;
        }
    }
    return full == "__torch__.torch.nn.functional." + name;
}

/// true when the result of `node` is silu of `value` and nothing else happens: `aten::silu`,
/// `torch.nn.functional.silu`, or a function or module such as torch.nn.SiLU that only calls one of
/// them.
bool is_silu(const Node *node, const Value *value) {
    if (node->kind() == c10::aten::silu) {
        return node->input() == value;
    }
    auto calls = node->kind() == c10::prim::CallFunction || node->kind() == c10::prim::CallMethod;
    if (!calls || node->inputs().size() < 2 || node->input(1) != value) {
        return false;
    }
    if (node->kind() == c10::prim::CallFunction && is_torch_function(node, "silu")) {
        auto in_place = torch::jit::constant_as<bool>(node->input(2));
        return in_place.has_value() && !*in_place;
    }
    auto graph = graph_of(called_function(node));
    auto first = node->kind() == c10::prim::CallMethod ? 1U : 0U;
    if (graph == nullptr || node->inputs().size() != 2 || graph->inputs().size() != first + 1) {
        return false;
    }
    const auto *inner = only_node(*graph);
    return inner != nullptr && is_silu(inner, graph->inputs()[first]);
}

/// The only use of `value`, in the block it comes from; nullptr where there are others.
Node *only_user(const Value *value) {
    if (value->uses().size() != 1) {
        return nullptr;
    }
    auto *user = value->uses()[0].user;
    return user->owningBlock() == value->node()->owningBlock() ? user : nullptr;
}

/// Nodes that compute an activation of a linear layer's result, in their order.
struct ActivationNodes {
    std::string name;
    std::vector<Node *> nodes;
};

/// The activation of `product`, where that is all that is made of it.
std::optional<ActivationNodes> activation_of(const Value *product) {
    auto *user = only_user(product);
    if (user == nullptr) {
        return std::nullopt;
    }
    if (is_silu(user, product)) {
        return ActivationNodes{"silu", {user}};
    }
    // v, g = product.chunk(2, -1); v * sigmoid(g)
    if (user->kind() != c10::aten::chunk || user->input(0) != product ||
        torch::jit::constant_as<int64_t>(user->input(1)) != 2 ||
        torch::jit::constant_as<int64_t>(user->input(2)) != -1) {
        return std::nullopt;
    }
    auto *unpack = only_user(user->output());
    if (unpack == nullptr || unpack->kind() != c10::prim::ListUnpack ||
        unpack->outputs().size() != 2) {
        return std::nullopt;
    }
    auto *value = unpack->output(0);
    auto *sigmoid = only_user(unpack->output(1));
    if (sigmoid == nullptr || sigmoid->kind() != c10::aten::sigmoid) {
        return std::nullopt;
    }
    auto *product_of_both = only_user(sigmoid->output());
    if (product_of_both == nullptr || product_of_both->kind() != c10::aten::mul ||
        product_of_both != only_user(value)) {
        return std::nullopt;
    }
    return ActivationNodes{"swiglu", {user, unpack, sigmoid, product_of_both}};
}

/// The weight that the linear layer `node` has in the module `self`, where the module has it.
std::optional<c10::IValue>
weight_of(const Node *node, const Graph &graph, const torch::jit::Module &self) {
    auto path = std::string();
    if (node->kind() != c10::prim::CallMethod) {
        return resolve(node->input(1), graph, self, path);
    }
    auto layer = resolve(node->input(0), graph, self, path);
    if (!layer.has_value() || !layer->isObject()) {
        return std::nullopt;
    }
    return layer->toObject()->getAttr("weight");
}

/// true when every module with this graph has a weight with an even number of output features:
/// `chunk` makes unequal halves of odd numbers.
bool halves_are_equal(const Node *node, const std::vector<Code> &code) {
    return std::all_of(code.begin(), code.end(), [&](const auto &other) {
        if (other.graph.get() != node->owningGraph()) {
            return true;
        }
        auto weight =
            other.self.has_value() ? weight_of(node, *other.graph, *other.self) : std::nullopt;
        return weight.has_value() && weight->isTensor() && weight->toTensor().dim() == 2 &&
               weight->toTensor().size(0) % 2 == 0;
    });
}

/// Makes one `metatomic_tc::linear_activation` of `node`, a linear layer or the call of one, and
/// the activation of its result. The layer's place is kept, so that whatever changes its input
/// afterwards still does not matter.
void fuse(Node *node, const ActivationNodes &activation, Mode mode) {
    auto *graph = node->owningGraph();
    auto guard = torch::jit::WithInsertPoint(node);
    auto inputs = std::vector<Value *>();
    if (node->kind() == c10::prim::CallMethod) {
        auto *layer = node->input(0);
        auto *weight = graph->insertGetAttr(layer, "weight");
        auto *bias = linear_of_module(node)->input(2)->mustBeNone()
                         ? graph->insertConstant(c10::IValue())
                         : graph->insertGetAttr(layer, "bias");
        inputs = {node->input(1), weight, bias};
    } else {
        inputs = {node->input(0), node->input(1), node->input(2)};
    }
    inputs.push_back(graph->insertConstant(activation.name));
    inputs.push_back(graph->insertConstant(to_string(mode)));
    auto *result = activation.nodes.back()->output();
    auto *replacement = graph->insertNode(graph->create(our_linear_activation, inputs, 1));
    replacement->setSourceRange(node->sourceRange());
    replacement->output()->copyMetadata(result);
    result->replaceAllUsesWith(replacement->output());
    for (auto old = activation.nodes.rbegin(); old != activation.nodes.rend(); old++) {
        (*old)->destroy();
    }
    node->destroy();
}

void fuse_activations(Graph &graph, const std::vector<Code> &code, Mode mode) {
    auto content = content_of(graph);
    auto candidates = content.linears;
    for (auto *call : content.method_calls) {
        if (linear_of_module(call) != nullptr) {
            candidates.push_back(call);
        }
    }
    for (auto *node : candidates) {
        auto activation = activation_of(node->output());
        if (activation.has_value() &&
            (activation->name != "swiglu" || halves_are_equal(node, code))) {
            fuse(node, *activation, mode);
        }
    }
}

/// Makes a linear layer and an activation of every `metatomic_tc::linear_activation`.
void separate_activations(Graph &graph, Mode mode) {
    for (auto *node : content_of(graph).fused) {
        auto activation = torch::jit::constant_as<std::string>(node->input(3));
        if (activation != "silu" && activation != "swiglu") {
            continue;
        }
        auto guard = torch::jit::WithInsertPoint(node);
        auto *mode_name = graph.insertConstant(to_string(mode));
        auto *linear = graph.insertNode(
            graph.create(our_linear, {node->input(0), node->input(1), node->input(2), mode_name}, 1)
        );
        auto *result = linear->output();
        if (activation == "silu") {
            result = graph.insert(c10::aten::silu, {result});
        } else {
            auto *halves = graph.insert(c10::aten::chunk, {result, 2, -1});
            auto *unpack = graph.insertNode(graph.createListUnpack(halves, 2));
            auto *gate = graph.insert(c10::aten::sigmoid, {unpack->output(1)});
            result = graph.insert(c10::aten::mul, {unpack->output(0), gate});
        }
        for (auto *made : {linear, result->node()}) {
            made->setSourceRange(node->sourceRange());
        }
        result->copyMetadata(node->output());
        node->output()->replaceAllUsesWith(result);
        node->destroy();
    }
}

// ---- linear layers ----

void set_mode(Node *node, Value *mode_name) {
    auto *graph = node->owningGraph();
    if (node->kind() == our_linear_activation) {
        node->replaceInput(4, mode_name);
        return;
    }
    auto *replacement =
        graph->create(our_linear, {node->input(0), node->input(1), node->input(2), mode_name}, 1);
    replacement->setSourceRange(node->sourceRange());
    replacement->insertBefore(node);
    replacement->output()->copyMetadata(node->output());
    node->output()->replaceAllUsesWith(replacement->output());
    node->destroy();
}

// ---- the report ----

/// A layer, and the module that its weight belongs to.
struct DescribedLayer {
    LinearLayer layer;
    /// nullptr when the weight is no parameter.
    const c10::ivalue::Object *owner;
    /// true when the layer is in a method of its owner.
    bool own;
};

/// The layer `node` of the module `self`, called `module_path`.
DescribedLayer describe(
    const Node *node,
    const Graph &graph,
    const torch::jit::Module &self,
    const std::string &module_path
) {
    auto path = std::string();
    auto weight = resolve(node->input(1), graph, self, path);
    auto result = DescribedLayer{{module_path, -1, -1, true}, nullptr, false};
    auto &layer = result.layer;
    if (weight.has_value() && weight->isTensor() && weight->toTensor().dim() == 2) {
        layer.out_features = weight->toTensor().size(0);
        layer.in_features = weight->toTensor().size(1);
        layer.replaced = !stays_fp32(layer.in_features, layer.out_features);
        auto owner_path = std::string();
        auto owner = resolve(node->input(1)->node()->input(), graph, self, owner_path);
        result.owner = owner->toObject().get();
        result.own = result.owner == self._ivalue().get();
        // self.layer.weight of module "a" is the layer "a.layer"
        auto dot = path.rfind('.');
        if (dot != std::string::npos) {
            if (!layer.path.empty()) {
                layer.path += '.';
            }
            layer.path.append(path, 0, dot);
        }
    }
    return result;
}

/// Number of fused activations in `block` of a module. Of a branch on an attribute, such as
/// self.is_swiglu, only the side that this module takes counts.
int64_t count_fused(const Block *block, const Code &code) {
    auto count = int64_t(0);
    for (const auto *node : block->nodes()) {
        count += node->kind() == our_linear_activation ? 1 : 0;
        auto blocks = node->blocks();
        if (node->kind() == c10::prim::If && code.self.has_value()) {
            auto path = std::string();
            auto condition = resolve(node->input(), *code.graph, *code.self, path);
            if (condition.has_value() && condition->isBool()) {
                blocks = blocks.slice(condition->toBool() ? 0 : 1, 1);
            }
        }
        for (const auto *inner : blocks) {
            count += count_fused(inner, code);
        }
    }
    return count;
}

/// The columns of a head of an attention whose queries, keys and values come from a layer; -1 for
/// any other.
int64_t head_size_of(const Node *attention, const Graph &graph, const torch::jit::Module &self) {
    const auto *layer = attention->input(0)->node();
    auto path = std::string();
    auto weight = std::optional<c10::IValue>();
    if (layer->kind() == c10::prim::CallMethod) {
        auto owner = resolve(layer->input(0), graph, self, path);
        if (owner.has_value() && owner->isObject() &&
            owner->toObject()->type()->hasAttribute("weight")) {
            weight = owner->toObject()->getAttr("weight");
        }
    } else if (is_linear(layer)) {
        weight = resolve(layer->input(1), graph, self, path);
    }
    auto heads = torch::jit::toIValue(attention->input(3));
    if (!weight.has_value() || !weight->isTensor() || !heads.has_value() || !heads->isInt()) {
        return -1;
    }
    return weight->toTensor().size(0) / 3 / heads->toInt();
}

/// The attention of PET has the mode if that is for all layers.
Mode attention_mode(Mode mode, const LayerPattern &pattern) {
    return pattern.matches_all() ? mode : Mode::fp32;
}

ConversionReport report_on(const std::vector<Code> &code, Mode mode, const LayerPattern &pattern) {
    auto report = ConversionReport{mode, {}, {}, 0};
    auto layers = std::vector<DescribedLayer>();
    auto with_own_layer = std::unordered_set<const c10::ivalue::Object *>();
    for (const auto &part : code) {
        report.fused += count_fused(part.graph->block(), part);
        auto content = content_of(*part.graph);
        for (const auto *node : content.attentions) {
            auto head_size =
                part.self.has_value() ? head_size_of(node, *part.graph, *part.self) : -1;
            report.attention.push_back({part.name, head_size, attention_mode(mode, pattern)});
        }
        for (const auto &nodes : {content.linears, content.fused}) {
            for (const auto *node : nodes) {
                layers.push_back(
                    part.self.has_value()
                        ? describe(node, *part.graph, *part.self, part.name)
                        : DescribedLayer{{part.name, -1, -1, true}, nullptr, false}
                );
                if (layers.back().own) {
                    with_own_layer.insert(layers.back().owner);
                }
            }
        }
    }
    for (const auto &[layer, owner, own] : layers) {
        // where the call of a layer became an operator, the layer's own method still has one
        if (own || with_own_layer.count(owner) == 0) {
            report.layers.push_back(layer);
            auto &replaced = report.layers.back().replaced;
            replaced = replaced && pattern.matches(layer.path);
        }
    }
    return report;
}

// ---- modes of single layers ----

/// The attribute that holds the mode of a module's layers. Modules of one type share their graphs,
/// but not the values of their attributes.
constexpr auto mode_attribute = "metatomic_tc_mode";

/// true when the weight of `node` belongs to a module that `self` leads to.
bool has_owner(const Node *node, const Graph &graph, const torch::jit::Module &self) {
    return describe(node, graph, self, "").owner != nullptr;
}

/// Gives every module with layers, and modules that compute weights, a mode: `mode` where the path
/// of the layer matches.
void set_mode_attributes(const std::vector<Code> &code, Mode mode, const LayerPattern &pattern) {
    auto objects = std::unordered_map<const c10::ivalue::Object *, c10::IValue>();
    for (const auto &part : code) {
        if (part.self.has_value()) {
            for (const auto &named : part.self->named_modules()) {
                objects.emplace(named.value._ivalue().get(), named.value._ivalue());
            }
        }
    }
    auto applies = std::unordered_map<const c10::ivalue::Object *, bool>();
    for (const auto &part : code) {
        if (!part.self.has_value()) {
            continue;
        }
        auto content = content_of(*part.graph);
        for (const auto &nodes : {content.linears, content.fused}) {
            for (const auto *node : nodes) {
                auto described = describe(node, *part.graph, *part.self, part.name);
                const auto *owner = described.owner;
                if (owner == nullptr) {
                    owner = part.self->_ivalue().get();
                }
                applies[owner] = applies[owner] || pattern.matches(described.layer.path);
            }
        }
    }
    for (const auto &[object, matches] : applies) {
        auto module = torch::jit::Module(objects.at(object).toObject());
        module.register_attribute(
            mode_attribute, c10::StringType::get(), to_string(matches ? mode : Mode::fp32)
        );
    }
}

/// The mode of one layer, as a value of its graph.
Value *mode_value(Node *node, const Code &code, Mode mode, const LayerPattern &pattern) {
    auto &graph = *node->owningGraph();
    if (pattern.matches_all()) {
        return graph.insertConstant(to_string(mode));
    }
    if (!code.self.has_value()) {
        return graph.insertConstant(to_string(pattern.matches(code.name) ? mode : Mode::fp32));
    }
    auto *module =
        has_owner(node, graph, *code.self) ? node->input(1)->node()->input() : graph.inputs()[0];
    return graph.insertGetAttr(module, mode_attribute);
}

/// Appends a name that is not there yet.
void add(std::vector<std::string> &names, const std::string &name) {
    if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) {
        names.push_back(name);
    }
}

} // namespace

int64_t ConversionReport::replaced() const {
    return std::count_if(layers.begin(), layers.end(), [](const auto &layer) {
        return layer.replaced;
    });
}

int64_t ConversionReport::left() const {
    return static_cast<int64_t>(layers.size()) - replaced();
}

std::string ConversionReport::problem(const std::string &pattern, const std::string &file) const {
    if (LayerPattern(pattern).matches_all() || replaced() > 0) {
        return "";
    }
    auto examples =
        layers.empty() ? "" : ", such as " + layers.front().path + " and " + layers.back().path;
    return "layers '" + pattern + "' chooses none of the " + std::to_string(layers.size()) +
           " linear layers" + (file.empty() ? "" : " of " + file) + examples +
           ", or only such that are too small for a mode; all of them are listed by: metatomic-tc "
           "info " +
           (file.empty() ? "MODEL.pt" : file) + " --layers '*'";
}

std::vector<std::string>
ConversionReport::kernels(const LinearLayer &layer, const Hardware &hardware) const {
    auto used = layer.replaced ? mode : Mode::fp32;
    auto supported = supported_modes(hardware);
    auto result = std::vector<std::string>();
    if (layer.in_features < 0 ||
        std::find(supported.begin(), supported.end(), used) == supported.end()) {
        return result;
    }
    auto problem =
        Problem{.mode = used, .M = 1 << 20, .N = layer.out_features, .K = layer.in_features};
    add(result, plan(problem, hardware).name());
    std::swap(problem.N, problem.K);
    problem.direction = Direction::input_gradient;
    add(result, plan(problem, hardware).name());
    return result;
}

std::string ConversionReport::kernel(const AttentionLayer &layer, const Hardware &hardware) const {
    return layer.head_size < 0 ? ""
                               : to_string(attention_kernel(layer.mode, hardware, layer.head_size));
}

std::vector<std::string> ConversionReport::kernels(const Hardware &hardware) const {
    auto result = std::vector<std::string>();
    for (const auto &layer : layers) {
        if (layer.replaced) {
            for (const auto &name : kernels(layer, hardware)) {
                add(result, name);
            }
        }
    }
    for (const auto &layer : attention) {
        add(result, kernel(layer, hardware));
    }
    return result;
}

LayerPattern::LayerPattern(std::string pattern) : pattern_(std::move(pattern)) {
    if (!pattern_.empty() && pattern_[0] == '!') {
        inverted_ = true;
        pattern_.erase(0, 1);
    }
    if (pattern_.empty()) {
        throw std::invalid_argument(
            "the pattern for the paths of layers is empty; write for example \"*\", "
            "\"*.gnn_layers.*\" or \"!*heads*\""
        );
    }
}

bool LayerPattern::matches_all() const {
    return pattern_ == "*" && !inverted_;
}

bool LayerPattern::matches(const std::string &path) const {
    return (fnmatch(pattern_.c_str(), path.c_str(), 0) == 0) != inverted_;
}

ConversionReport
convert_linear_layers(torch::jit::Module &module, Mode mode, const std::string &layers) {
    auto pattern = LayerPattern(layers);
    auto code = code_of(module);
    auto parts = std::vector<const Code *>();
    auto seen = std::unordered_set<const Graph *>();
    for (const auto &part : code) {
        if (seen.insert(part.graph.get()).second) {
            parts.push_back(&part);
        }
    }
    for (const auto *part : parts) {
        // PyTorch's gradient of a fused swiglu rounds in another way, and fp32 is the unmodified
        // model bit by bit
        if (mode == Mode::fp32) {
            separate_activations(*part->graph, mode);
        } else {
            fuse_activations(*part->graph, code, mode);
        }
    }
    if (!pattern.matches_all()) {
        set_mode_attributes(code, mode, pattern);
    }
    for (const auto *part : parts) {
        auto content = content_of(*part->graph);
        for (const auto &nodes : {content.linears, content.fused}) {
            for (auto *node : nodes) {
                auto guard = torch::jit::WithInsertPoint(node);
                set_mode(node, mode_value(node, *part, mode, pattern));
            }
        }
        for (auto *node : content.attentions) {
            auto guard = torch::jit::WithInsertPoint(node);
            auto *value = part->graph->insertConstant(to_string(attention_mode(mode, pattern)));
            node->replaceInput(node->inputs().size() - 1, value);
        }
    }
    return report_on(code, mode, pattern);
}

} // namespace metatomic_tc
