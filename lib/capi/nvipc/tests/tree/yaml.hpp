/* A consumer's own yaml.hpp: a tree with the calls of NVIPC's `yaml::node`, of the file that consumer.cpp is run with. */
#ifndef YAML_HPP_INCLUDED_
#define YAML_HPP_INCLUDED_

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

enum yaml_node_type_t { YAML_NO_NODE, YAML_SCALAR_NODE, YAML_SEQUENCE_NODE, YAML_MAPPING_NODE };

namespace yaml {

class node {
public:
    node(const char *text) : type_(YAML_SCALAR_NODE), text_(text) {}
    node(std::vector<std::pair<std::string, node>> pairs) : type_(YAML_MAPPING_NODE), pairs_(std::move(pairs)) {}
    static node list(std::vector<node> items)
    {
        node made("");
        made.type_ = YAML_SEQUENCE_NODE;
        made.items_ = std::move(items);
        return made;
    }
    yaml_node_type_t type() const { return type_; }
    size_t length() const { return type_ == YAML_MAPPING_NODE ? pairs_.size() : items_.size(); }
    std::string key(size_t index) const { return pairs_.at(index).first; }
    node operator[](size_t index) const { return items_.at(index); }
    node operator[](const char *name) const
    {
        for (const auto &pair : pairs_)
            if (pair.first == name)
                return pair.second;
        throw std::runtime_error(name);
    }
    template <typename T> T as() const { return text_; }

private:
    yaml_node_type_t type_;
    std::string text_;
    std::vector<node> items_;
    std::vector<std::pair<std::string, node>> pairs_;
};

using map = std::vector<std::pair<std::string, node>>;

class document {
public:
    node root() const
    {
        node pools = map{{"cpu_msg", map{{"buf_size", "15000"}, {"pool_len", "4096"}}},
                         {"cpu_data", map{{"buf_size", "576000"}, {"pool_len", "16"}}}};
        node shm = map{{"prefix", "from-a-tree"}, {"cuda_device_id", "-1"}, {"ring_len", "4096"}, {"mempool_size", pools}};
        node app = map{{"msg_filter", node::list({"0x80"})}, {"note", "a \"quoted\": text"}};
        return map{{"transport", map{{"type", "shm"}, {"shm_config", shm}, {"app_config", app}}}};
    }
};

class file_parser {
public:
    explicit file_parser(const char *) {}
    document next_document() { return document(); }
};

} // namespace yaml

#endif
