#include "metatomic_tc/convert.hpp"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>

#include "json.hpp"
#include "metatomic_tc/dispatch.hpp"

namespace metatomic_tc {

namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

const auto stock_linear = c10::Symbol::fromQualString("aten::linear");
const auto our_linear = c10::Symbol::fromQualString("metatomic_tc::linear");

/// Linear layers and called free functions of one graph, nested blocks included.
struct GraphContent {
    std::vector<Node *> layers;
    std::vector<torch::jit::Function *> functions;
};

void collect(Block *block, GraphContent &content) {
    for (auto *node : block->nodes()) {
        if (node->kind() == stock_linear || node->kind() == our_linear) {
            content.layers.push_back(node);
        }
        if (node->kind() == c10::prim::CallFunction) {
            auto type = node->input(0)->type()->cast<c10::FunctionType>();
            if (type != nullptr) {
                content.functions.push_back(type->function());
            }
        }
        for (auto *inner : node->blocks()) {
            collect(inner, content);
        }
    }
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

/// The layer `node` of `self`, called `module_path`.
LinearLayer describe(
    const Node *node,
    const Graph &graph,
    const torch::jit::Module &self,
    const std::string &module_path
) {
    auto path = std::string();
    auto weight = resolve(node->input(1), graph, self, path);
    auto layer = LinearLayer{module_path, -1, -1, true};
    if (weight.has_value() && weight->isTensor() && weight->toTensor().dim() == 2) {
        layer.out_features = weight->toTensor().size(0);
        layer.in_features = weight->toTensor().size(1);
        layer.replaced = !stays_fp32(layer.in_features, layer.out_features);
        // self.layer.weight of module "a" is the layer "a.layer"
        auto dot = path.rfind('.');
        if (dot != std::string::npos) {
            if (!layer.path.empty()) {
                layer.path += '.';
            }
            layer.path.append(path, 0, dot);
        }
    }
    return layer;
}

void rewrite(Node *node, Mode mode) {
    auto *graph = node->owningGraph();
    auto guard = torch::jit::WithInsertPoint(node);
    auto *mode_name = graph->insertConstant(to_string(mode));
    auto *replacement =
        graph->create(our_linear, {node->input(0), node->input(1), node->input(2), mode_name}, 1);
    replacement->setSourceRange(node->sourceRange());
    replacement->insertBefore(node);
    replacement->output()->copyMetadata(node->output());
    node->output()->replaceAllUsesWith(replacement->output());
    node->destroy();
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

std::string ConversionReport::to_json() const {
    auto result = "{\"mode\": " + json_string(to_string(mode)) + ", \"layers\": [";
    auto separator = "";
    for (const auto &layer : layers) {
        result += separator;
        result += "{\"path\": " + json_string(layer.path);
        result += ", \"in_features\": " + std::to_string(layer.in_features);
        result += ", \"out_features\": " + std::to_string(layer.out_features);
        result += std::string(", \"replaced\": ") + (layer.replaced ? "true" : "false") + "}";
        separator = ", ";
    }
    return result + "]}";
}

ConversionReport convert_linear_layers(torch::jit::Module &module, Mode mode) {
    auto report = ConversionReport{mode, {}};
    // modules of one type share their graphs, so the layers are counted per module and method, and
    // each graph is rewritten once
    auto nodes = std::vector<Node *>();
    auto seen_nodes = std::unordered_set<Node *>();
    auto seen_functions = std::unordered_set<torch::jit::Function *>();
    auto remember = [&](const GraphContent &content) {
        for (auto *node : content.layers) {
            if (seen_nodes.insert(node).second) {
                nodes.push_back(node);
            }
        }
    };

    auto pending_functions = std::vector<torch::jit::Function *>();
    for (const auto &named : module.named_modules()) {
        for (const auto &method : named.value.get_methods()) {
            auto graph = method.graph();
            auto content = GraphContent();
            collect(graph->block(), content);
            for (const auto *node : content.layers) {
                report.layers.push_back(describe(node, *graph, named.value, named.name));
            }
            remember(content);
            pending_functions.insert(
                pending_functions.end(), content.functions.begin(), content.functions.end()
            );
        }
    }
    while (!pending_functions.empty()) {
        auto *function = pending_functions.back();
        pending_functions.pop_back();
        auto *graph_function = torch::jit::tryToGraphFunction(*function);
        if (graph_function == nullptr || !seen_functions.insert(function).second) {
            continue;
        }
        auto content = GraphContent();
        collect(graph_function->graph()->block(), content);
        for (std::size_t i = 0; i < content.layers.size(); i++) {
            report.layers.push_back({function->qualname().qualifiedName(), -1, -1, true});
        }
        remember(content);
        pending_functions.insert(
            pending_functions.end(), content.functions.begin(), content.functions.end()
        );
    }

    for (auto *node : nodes) {
        rewrite(node, mode);
    }
    return report;
}

} // namespace metatomic_tc
