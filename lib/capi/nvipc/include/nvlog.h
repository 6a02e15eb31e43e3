/*
 * A minimal version of the logger that NVIPC's programs call: it writes lines to standard error, and to a file if
 * nvlog_c_init names one. A program that defines these functions itself, or links a logger that does, gets these lines
 * instead. Lines about a link always go to standard error.
 *
 * In libnvipc.so and libnvlog.so. Names and numbers are NVIPC's. Tags are numbers here, without a table of names.
 */
#ifndef NVLOG_H_INCLUDED_
#define NVLOG_H_INCLUDED_

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "aerial_event_code.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* Levels. A line is written if its level is not above the one set by nvlog_set_log_level, by default NVLOG_CONSOLE. */
#define NVLOG_NONE 0
#define NVLOG_FATAL 1
#define NVLOG_ERROR 2
#define NVLOG_CONSOLE 3
#define NVLOG_WARN 4
#define NVLOG_INFO 5
#define NVLOG_DEBUG 6
#define NVLOG_VERBOSE 7

#define NVLOG_NAME_MAX_LEN 32
#define NVLOG_DEFAULT_TAG_NUM 1024
#define NVLOG_DEFAULT_CONFIG_FILE "cuPHY/nvlog/config/nvlog_config.yaml"

/* The first tag of each component. */
#define NVLOG_TAG_BASE_RESERVED 0
#define NVLOG_TAG_BASE_NVLOG 10
#define NVLOG_TAG_BASE_NVIPC 30
#define NVLOG_TAG_BASE_UTIL 80
#define NVLOG_TAG_BASE_CUPHY_CONTROLLER 100
#define NVLOG_TAG_BASE_CUPHY_DRIVER 200
#define NVLOG_TAG_BASE_L2_ADAPTER 300
#define NVLOG_TAG_BASE_SCF_L2_ADAPTER 330
#define NVLOG_TAG_BASE_TEST_MAC 400
#define NVLOG_TAG_BASE_CUMAC_CP 450
#define NVLOG_TAG_BASE_RU_EMULATOR 500
#define NVLOG_TAG_BASE_FH_DRIVER 600
#define NVLOG_TAG_BASE_FH_GENERATOR 650
#define NVLOG_TAG_BASE_COMPRESSION 700
#define NVLOG_TAG_BASE_CUPHY_OAM 800
#define NVLOG_TAG_BASE_CUPHY 900
#define NVLOG_TAG_BASE_TESTBENCH 1000
#define NVLOG_TAG_BASE_DLC_TESTBENCH 1010
#define NVLOG_TAG_BASE_APP_CFG_UTILS 1100
#define NVLOG_TAG_BASE_CUMAC 1200

/* Writes a line. `event` is an event name of aerial_event_code.h. */
void nvlog_c_print(int level, int itag, const char *format, ...) __attribute__((format(printf, 3, 4)));
void nvlog_e_c_print(int level, int itag, const char *event, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

void nvlog_set_log_level(int log_level);
/* Size in bytes at which the file starts over; 0 for no limit. */
void nvlog_set_max_file_size(size_t size);
/* Writes lines to this file as well. If it is NULL or cannot be written, they only go to standard error. */
void nvlog_c_init(const char *file);
void nvlog_c_close(void);
/* The name of an event; never NULL. */
char *nvlog_strerror(int code);

#define NVLOG_C(level, tag, ...) nvlog_c_print(level, tag, __VA_ARGS__)
#define NVLOG_E_C(level, tag, event, ...) nvlog_e_c_print(level, tag, #event, __VA_ARGS__)

#define NVLOGV(tag, ...) NVLOG_C(NVLOG_VERBOSE, tag, __VA_ARGS__)
#define NVLOGD(tag, ...) NVLOG_C(NVLOG_DEBUG, tag, __VA_ARGS__)
#define NVLOGI(tag, ...) NVLOG_C(NVLOG_INFO, tag, __VA_ARGS__)
#define NVLOGW(tag, ...) NVLOG_C(NVLOG_WARN, tag, __VA_ARGS__)
#define NVLOGC(tag, ...) NVLOG_C(NVLOG_CONSOLE, tag, __VA_ARGS__)
#define NVLOGE(tag, event, ...) NVLOG_E_C(NVLOG_ERROR, tag, event, __VA_ARGS__)
#define NVLOGE_NO(tag, event, ...) NVLOG_E_C(NVLOG_ERROR, tag, event, __VA_ARGS__)
/* The fatal level, which ends the process, as the caller requests. */
#define NVLOGF(tag, event, ...)                           \
    do {                                                  \
        NVLOG_E_C(NVLOG_FATAL, tag, event, __VA_ARGS__);  \
        exit(1);                                          \
    } while (0)

/* Copies a string, truncates it if needed, and always terminates it. */
static inline char *nvlog_safe_strncpy(char *to, const char *from, size_t room)
{
    size_t len = 0;
    for (; to != NULL && from != NULL && len + 1 < room && from[len] != '\0'; len++)
        to[len] = from[len];
    if (to != NULL && room > 0)
        to[len] = '\0';
    return to;
}

static inline int nvlog_gettime(struct timespec *ts)
{
    return clock_gettime(CLOCK_MONOTONIC, ts);
}

static inline int nvlog_gettime_rt(struct timespec *ts)
{
    return clock_gettime(CLOCK_REALTIME, ts);
}

/* Nanoseconds between two times. */
static inline int64_t nvlog_timespec_interval(struct timespec *from, struct timespec *to)
{
    return (int64_t)(to->tv_sec - from->tv_sec) * 1000000000 + (to->tv_nsec - from->tv_nsec);
}

/* Nanoseconds since a time of the real-time clock. */
static inline int64_t nvlog_get_interval(struct timespec *from)
{
    struct timespec now;
    nvlog_gettime_rt(&now);
    return nvlog_timespec_interval(from, &now);
}

static inline void nvlog_timespec_add(struct timespec *ts, int64_t ns)
{
    int64_t sum = ts->tv_nsec + ns;
    ts->tv_sec += (time_t)(sum / 1000000000);
    ts->tv_nsec = (long)(sum % 1000000000);
}

/* Microseconds between two times. */
static inline int64_t nvlog_timeval_interval(struct timeval *from, struct timeval *to)
{
    return (int64_t)(to->tv_sec - from->tv_sec) * 1000000 + (to->tv_usec - from->tv_usec);
}

#define NVLOG_TIME_STRING_LEN (16)

/* Writes the time of day with microseconds into 16 bytes or more. */
static inline void nvlog_gettimeofday_string(char *to, int32_t room)
{
    struct timeval now;
    struct tm day;
    if (to == NULL || room < NVLOG_TIME_STRING_LEN)
        return;
    gettimeofday(&now, NULL);
    if (localtime_r(&now.tv_sec, &day) != NULL && strftime(to, 9, "%H:%M:%S", &day) == 8)
        snprintf(to + 8, (size_t)room - 8, ".%06u", (unsigned)now.tv_usec % 1000000);
}

#if defined(__cplusplus)
}
#endif

#endif
