/*
 * Log lines in the format of `fmt`, for C++: NVLOGC_FMT(tag, "{} cells", 3). Uses <fmt/format.h> if it exists, otherwise
 * <format> of C++20. With neither, the format string itself is logged. See nvlog.h.
 */
#ifndef NVLOG_HPP_INCLUDED_
#define NVLOG_HPP_INCLUDED_

#include <cstdlib>
#include <string>
#include <utility>

#include "nv_utils.h"
#include "nvlog.h"

#if defined(__has_include)
#if __has_include(<fmt/format.h>)
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#include <fmt/format.h>
#define SHMESH_NVLOG_FMT_ fmt
#elif __cplusplus >= 202002L && __has_include(<format>)
#include <format>
#ifdef __cpp_lib_format
#define SHMESH_NVLOG_FMT_ std
#endif
#endif
#endif

namespace shmesh_nvlog {

template <typename... Args>
void line(int level, int tag, const char *event, const char *format, const Args &...args)
{
    std::string text = format;
#ifdef SHMESH_NVLOG_FMT_
    try {
        text = SHMESH_NVLOG_FMT_::vformat(format, SHMESH_NVLOG_FMT_::make_format_args(args...));
    } catch (...) {
        /* The format is invalid. A log line is no reason to end the process. */
    }
#else
    const int unused[] = {0, (static_cast<void>(args), 0)...};
    static_cast<void>(unused);
#endif
    if (event != nullptr)
        nvlog_e_c_print(level, tag, event, "%s", text.c_str());
    else
        nvlog_c_print(level, tag, "%s", text.c_str());
}

} // namespace shmesh_nvlog

#define NVLOGV_FMT(tag, ...) shmesh_nvlog::line(NVLOG_VERBOSE, tag, nullptr, __VA_ARGS__)
#define NVLOGD_FMT(tag, ...) shmesh_nvlog::line(NVLOG_DEBUG, tag, nullptr, __VA_ARGS__)
#define NVLOGI_FMT(tag, ...) shmesh_nvlog::line(NVLOG_INFO, tag, nullptr, __VA_ARGS__)
#define NVLOGW_FMT(tag, ...) shmesh_nvlog::line(NVLOG_WARN, tag, nullptr, __VA_ARGS__)
#define NVLOGC_FMT(tag, ...) shmesh_nvlog::line(NVLOG_CONSOLE, tag, nullptr, __VA_ARGS__)
#define NVLOGI_FMT_EVT(tag, event, ...) shmesh_nvlog::line(NVLOG_INFO, tag, #event, __VA_ARGS__)
#define NVLOGE_FMT(tag, event, ...) shmesh_nvlog::line(NVLOG_ERROR, tag, #event, __VA_ARGS__)
#define NVLOGE_NO_FMT(tag, event, ...) shmesh_nvlog::line(NVLOG_ERROR, tag, #event, __VA_ARGS__)
#define NVLOGF_FMT(tag, event, ...)                                         \
    do {                                                                    \
        shmesh_nvlog::line(NVLOG_FATAL, tag, #event, __VA_ARGS__);          \
        std::exit(1);                                                       \
    } while (0)

#endif
