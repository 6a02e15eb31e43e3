/* Configuration from a YAML document that the program has parsed itself. See nv_ipc.h. */
#ifndef NV_IPC_HPP_INCLUDED_
#define NV_IPC_HPP_INCLUDED_

#include <cstdio>
#include <string>

#include "nv_ipc.h"
#include "nv_ipc_utils.h"
/* The program's own header, if its include directories come first. */
#include <yaml.hpp>

extern "C" {
/* As load_nv_ipc_yaml_config, from text. */
int shmesh_nvipc_parse_yaml(nv_ipc_config_t *cfg, const char *text, nv_ipc_module_t module_type);
}

namespace shmesh_nvipc {

/* Appends a quoted string that may contain any bytes. */
inline void quote(const std::string &text, std::string &to)
{
    to += '"';
    for (const char c : text) {
        const unsigned char byte = static_cast<unsigned char>(c);
        char escaped[8];
        if (byte < 0x20 || c == '"' || c == '\\') {
            std::snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
            to += escaped;
        } else {
            to += c;
        }
    }
    to += '"';
}

/* Writes a part of a document on one line. Numbers and words stay as they are, other scalars are quoted. */
template <typename Node>
void write(Node at, std::string &to)
{
    if (at.type() == YAML_MAPPING_NODE) {
        to += '{';
        for (size_t i = 0; i < at.length(); i++) {
            const std::string key = at.key(i);
            quote(key, to);
            to += ": ";
            write(at[key.c_str()], to);
            to += ", ";
        }
        to += '}';
    } else if (at.type() == YAML_SEQUENCE_NODE) {
        to += '[';
        for (size_t i = 0; i < at.length(); i++) {
            write(at[i], to);
            to += ", ";
        }
        to += ']';
    } else if (at.type() == YAML_SCALAR_NODE) {
        const std::string text = at.template as<std::string>();
        const bool is_plain = !text.empty() && text[0] != '-' &&
            text.find_first_not_of("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.-/") == std::string::npos;
        const bool is_negative = text.size() > 1 && text[0] == '-' && text.find_first_not_of("0123456789", 1) == std::string::npos;
        if (is_plain || is_negative)
            to += text;
        else
            quote(text, to);
    } else {
        to += '~';
    }
}

} // namespace shmesh_nvipc

/* Fills in cfg from the node `transport` of a file. Returns 0, or -1 with cfg unchanged. */
inline int nv_ipc_parse_yaml_node(nv_ipc_config_t *cfg, yaml::node *yaml_node, nv_ipc_module_t module_type)
{
    std::string text = "transport: ";
    try {
        if (yaml_node == nullptr)
            return -1;
        shmesh_nvipc::write(*yaml_node, text);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "shmesh_nvipc: nv_ipc_parse_yaml_node: %s\n", error.what());
        return -1;
    }
    return shmesh_nvipc_parse_yaml(cfg, text.c_str(), module_type);
}

#endif
