/* A libyaml document as a tree, with the interface that NVIPC's C++ programs use. Errors are std::runtime_error. Needs
 * libyaml. */
#ifndef YAML_HPP_INCLUDED_
#define YAML_HPP_INCLUDED_

#include <yaml.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace yaml {

[[noreturn]] inline void fail(const std::string &text)
{
    throw std::runtime_error("YAML: " + text);
}

namespace scalar {

inline void read(const std::string &text, std::string &to)
{
    to = text;
}

template <typename T>
typename std::enable_if<std::is_floating_point<T>::value>::type read(const std::string &text, T &to)
{
    char *end = nullptr;
    to = static_cast<T>(std::strtod(text.c_str(), &end));
    if (text.empty() || *end != '\0')
        fail("\"" + text + "\" is no number");
}

/* Parses decimal numbers, octal with 0 and hexadecimal with 0x. */
template <typename T>
typename std::enable_if<std::is_integral<T>::value>::type read(const std::string &text, T &to)
{
    char *end = nullptr;
    errno = 0;
    if (std::is_signed<T>::value) {
        const long long value = std::strtoll(text.c_str(), &end, 0);
        to = static_cast<T>(value);
        if (static_cast<long long>(to) != value)
            errno = ERANGE;
    } else {
        const unsigned long long value = std::strtoull(text.c_str(), &end, 0);
        to = static_cast<T>(value);
        if (static_cast<unsigned long long>(to) != value || text[0] == '-')
            errno = ERANGE;
    }
    if (text.empty() || *end != '\0' || errno != 0)
        fail("\"" + text + "\" is no number of this size");
}

} // namespace scalar

/* A part of a document, valid as long as the document. */
class node {
public:
    node(yaml_document_t *document, yaml_node_t *at) : document_(document), at_(at) {}

    yaml_node_type_t type() const
    {
        return at_ != nullptr ? at_->type : YAML_NO_NODE;
    }

    const char *type_string() const
    {
        switch (type()) {
        case YAML_SCALAR_NODE: return "scalar";
        case YAML_SEQUENCE_NODE: return "sequence";
        case YAML_MAPPING_NODE: return "mapping";
        default: return "nothing";
        }
    }

    /* Number of characters of a scalar, elements of a sequence, or pairs of a mapping. */
    size_t length() const
    {
        switch (type()) {
        case YAML_SCALAR_NODE: return at_->data.scalar.length;
        case YAML_SEQUENCE_NODE: return static_cast<size_t>(at_->data.sequence.items.top - at_->data.sequence.items.start);
        case YAML_MAPPING_NODE: return static_cast<size_t>(at_->data.mapping.pairs.top - at_->data.mapping.pairs.start);
        default: return 0;
        }
    }

    std::string key(size_t index) const
    {
        return text_of(yaml_document_get_node(document_, pair(index).key));
    }

    bool has_key(const char *name) const
    {
        return find(name) != nullptr;
    }

    node operator[](const char *name) const
    {
        const yaml_node_pair_t *found = find(name);
        if (found == nullptr)
            fail("there is no key \"" + std::string(name) + "\"");
        return node(document_, yaml_document_get_node(document_, found->value));
    }

    node operator[](const std::string &name) const
    {
        return (*this)[name.c_str()];
    }

    node operator[](size_t index) const
    {
        is(YAML_SEQUENCE_NODE);
        if (index >= length())
            fail("element " + std::to_string(index) + " of a sequence of " + std::to_string(length()));
        return node(document_, yaml_document_get_node(document_, at_->data.sequence.items.start[index]));
    }

    node operator[](int index) const
    {
        return (*this)[static_cast<size_t>(index)];
    }

    node child(size_t index) const
    {
        return (*this)[index];
    }

    template <typename T>
    T as() const
    {
        T value;
        scalar::read(text_of(at_), value);
        return value;
    }

    operator float() const { return as<float>(); }
    operator int() const { return as<int>(); }
    operator unsigned int() const { return as<unsigned int>(); }
    operator uint8_t() const { return as<uint8_t>(); }
    operator uint16_t() const { return as<uint16_t>(); }
    operator uint64_t() const { return as<uint64_t>(); }
    operator std::string() const { return as<std::string>(); }

private:
    void is(yaml_node_type_t wanted) const
    {
        if (type() != wanted)
            fail(std::string("a ") + type_string() + " is used as something else");
    }

    static std::string text_of(const yaml_node_t *at)
    {
        if (at == nullptr || at->type != YAML_SCALAR_NODE)
            fail("there is no scalar");
        return std::string(reinterpret_cast<const char *>(at->data.scalar.value), at->data.scalar.length);
    }

    const yaml_node_pair_t &pair(size_t index) const
    {
        is(YAML_MAPPING_NODE);
        if (index >= length())
            fail("pair " + std::to_string(index) + " of a mapping of " + std::to_string(length()));
        return at_->data.mapping.pairs.start[index];
    }

    const yaml_node_pair_t *find(const char *name) const
    {
        is(YAML_MAPPING_NODE);
        for (size_t i = 0; i < length(); i++)
            if (key(i) == name)
                return &pair(i);
        return nullptr;
    }

    yaml_document_t *document_;
    yaml_node_t *at_;
};

class document {
public:
    /* Takes ownership of an object that was created with `new`. */
    explicit document(yaml_document_t *document) : document_(document) {}

    node root() const
    {
        return node(document_.get(), yaml_document_get_root_node(document_.get()));
    }

private:
    struct end {
        void operator()(yaml_document_t *document) const
        {
            yaml_document_delete(document);
            delete document;
        }
    };
    std::unique_ptr<yaml_document_t, end> document_;
};

class parser {
public:
    parser()
    {
        if (yaml_parser_initialize(&parser_) == 0)
            fail("there is no memory for a parser");
    }
    ~parser() { yaml_parser_delete(&parser_); }
    parser(const parser &) = delete;
    parser &operator=(const parser &) = delete;

    document next_document()
    {
        std::unique_ptr<yaml_document_t> read(new yaml_document_t);
        if (yaml_parser_load(&parser_, read.get()) == 0)
            fail(std::string(parser_.problem != nullptr ? parser_.problem : "it cannot be read") + ", line " +
                 std::to_string(parser_.problem_mark.line + 1));
        return document(read.release());
    }

protected:
    yaml_parser_t *parser_addr() { return &parser_; }

private:
    yaml_parser_t parser_;
};

class file_parser : public parser {
public:
    explicit file_parser(const char *name) : file_(std::fopen(name, "r"))
    {
        if (file_ == nullptr)
            fail(std::string("cannot open ") + name);
        yaml_parser_set_input_file(parser_addr(), file_);
    }
    ~file_parser() { std::fclose(file_); }

private:
    std::FILE *file_;
};

} // namespace yaml

#endif
