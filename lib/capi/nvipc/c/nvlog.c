/*
 * The logger, statistics and thread helpers that NVIPC's programs call: libnvlog.so, and a part of libnvipc.so. In C, because a
 * function with any number of arguments can be written in nothing else.
 */
#define _GNU_SOURCE
#include "nvlog.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>

#include "nv_utils.h"
#include "stat_log.h"

#define LINE_MAX_BYTES 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Guarded by the lock. */
static FILE *file;
static size_t file_bytes, file_bytes_max;
/* Read without it: a line that should not be written costs one look. */
static int max_level = NVLOG_CONSOLE;

static void write_line(int level, int tag, const char *event, const char *format, va_list args)
{
    static const char letters[] = "?FECWIDV";
    char line[LINE_MAX_BYTES], now[NVLOG_TIME_STRING_LEN] = "";
    nvlog_gettimeofday_string(now, sizeof(now));
    size_t room = sizeof(line) - 1; /* for the end of the line */
    int head = snprintf(line, room, "%s %c [%d]%s%s ", now, letters[level & 7], tag, event != NULL ? " " : "",
                        event != NULL ? event : "");
    size_t len = head > 0 ? (size_t)head : 0;
    if (len < room) {
        int more = vsnprintf(line + len, room - len, format, args);
        len += more > 0 ? (size_t)more : 0;
    }
    if (len >= room)
        len = room - 1;
    if (len == 0 || line[len - 1] != '\n')
        line[len++] = '\n';
    /* What the caller looks at next is its own error. */
    int before = errno;
    pthread_mutex_lock(&lock);
    if (file != NULL) {
        if (file_bytes_max > 0 && file_bytes + len > file_bytes_max && ftruncate(fileno(file), 0) == 0)
            file_bytes = 0;
        if (fwrite(line, 1, len, file) == len && fflush(file) == 0)
            file_bytes += len;
    }
    if (file == NULL || level <= NVLOG_CONSOLE)
        fwrite(line, 1, len, stderr);
    pthread_mutex_unlock(&lock);
    errno = before;
}

static int is_wanted(int level)
{
    return level > NVLOG_NONE && level <= NVLOG_VERBOSE && level <= __atomic_load_n(&max_level, __ATOMIC_RELAXED);
}

void nvlog_c_print(int level, int itag, const char *format, ...)
{
    if (!is_wanted(level) || format == NULL)
        return;
    va_list args;
    va_start(args, format);
    write_line(level, itag, NULL, format, args);
    va_end(args);
}

void nvlog_e_c_print(int level, int itag, const char *event, const char *format, ...)
{
    if (!is_wanted(level) || format == NULL)
        return;
    va_list args;
    va_start(args, format);
    write_line(level, itag, event, format, args);
    va_end(args);
}

void nvlog_set_log_level(int log_level)
{
    __atomic_store_n(&max_level, log_level, __ATOMIC_RELAXED);
}

void nvlog_set_max_file_size(size_t size)
{
    pthread_mutex_lock(&lock);
    file_bytes_max = size;
    pthread_mutex_unlock(&lock);
}

void nvlog_c_init(const char *name)
{
    FILE *opened = name != NULL ? fopen(name, "ae") : NULL;
    if (name != NULL && opened == NULL)
        NVLOGC(NVLOG_TAG_BASE_NVLOG, "log file %s: %m; lines go to standard error", name);
    pthread_mutex_lock(&lock);
    FILE *before = file;
    file = opened;
    long at = file != NULL ? ftell(file) : 0;
    file_bytes = at > 0 ? (size_t)at : 0;
    pthread_mutex_unlock(&lock);
    if (before != NULL)
        fclose(before);
}

void nvlog_c_close(void)
{
    nvlog_c_init(NULL);
}

char *nvlog_strerror(int code)
{
    static char *names[] = {
        "AERIAL_SUCCESS",           "AERIAL_INVALID_PARAM_EVENT", "AERIAL_INTERNAL_EVENT",
        "AERIAL_CUDA_API_EVENT",    "AERIAL_DPDK_API_EVENT",      "AERIAL_THREAD_API_EVENT",
        "AERIAL_CLOCK_API_EVENT",   "AERIAL_NVIPC_API_EVENT",     "AERIAL_ORAN_FH_EVENT",
        "AERIAL_CUPHYDRV_API_EVENT", "AERIAL_INPUT_OUTPUT_EVENT", "AERIAL_MEMORY_EVENT",
        "AERIAL_YAML_PARSER_EVENT", "AERIAL_NVLOG_EVENT",         "AERIAL_CONFIG_EVENT",
        "AERIAL_FAPI_EVENT",        "AERIAL_NO_SUPPORT_EVENT",    "AERIAL_SYSTEM_API_EVENT",
        "AERIAL_L2ADAPTER_EVENT",   "AERIAL_RU_EMULATOR_EVENT",   "AERIAL_CUDA_KERNEL_EVENT",
        "AERIAL_CUPHY_API_EVENT",   "AERIAL_DOCA_API_EVENT",      "AERIAL_CUPHY_EVENT",
        "AERIAL_CUPHYOAM_EVENT",    "AERIAL_CUMAC_EVENT",         "AERIAL_TEST_CUMAC_EVENT",
        "AERIAL_TESTBENCH_EVENT",   "AERIAL_CUMAC_CP_EVENT",      "AERIAL_TEST_MAC_EVENT",
        "AERIAL_PYAERIAL_EVENT",    "AERIAL_PTP_ERROR_EVENT",
    };
    size_t count = sizeof(names) / sizeof(names[0]);
    return code >= 0 && (size_t)code < count ? names[code] : "unknown event";
}

int nv_get_absolute_path(char *absolute_path, const char *relative_path)
{
    if (absolute_path == NULL || relative_path == NULL)
        return -1;
    char folder[PATH_MAX];
    ssize_t len = readlink("/proc/self/exe", folder, sizeof(folder) - 1);
    if (len <= 0)
        return -1;
    folder[len] = '\0';
    /* Up from the program to its folder, and once more for each step of the path. */
    char *end = strrchr(folder, '/');
    for (;;) {
        if (end != NULL)
            *end = '\0';
        if (strncmp(relative_path, "./", 2) == 0) {
            relative_path += 2;
            end = NULL;
        } else if (strncmp(relative_path, "../", 3) == 0) {
            relative_path += 3;
            end = strrchr(folder, '/');
        } else {
            break;
        }
    }
    int written = snprintf(absolute_path, PATH_MAX, "%s/%s", folder, relative_path);
    return written < PATH_MAX ? written : -1;
}

int nv_set_sched_fifo_priority(int priority)
{
    struct sched_param param = {.sched_priority = priority};
    int error = pthread_setschedparam(pthread_self(), SCHED_FIFO, &param);
    if (error == 0)
        return 0;
    NVLOGE_NO(NVLOG_TAG_BASE_NVLOG, AERIAL_THREAD_API_EVENT,
              "SCHED_FIFO with priority %d: %s; it takes CAP_SYS_NICE or an rtprio limit", priority, strerror(error));
    return -1;
}

int nv_assign_thread_cpu_core(int cpu_id)
{
    cpu_set_t cores;
    CPU_ZERO(&cores);
    int error = EINVAL;
    if (cpu_id >= 0 && cpu_id < CPU_SETSIZE) {
        CPU_SET(cpu_id, &cores);
        error = pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores);
    }
    if (error == 0)
        return 0;
    NVLOGE_NO(NVLOG_TAG_BASE_NVLOG, AERIAL_THREAD_API_EVENT, "core %d: %s; name one that this process may use", cpu_id,
              strerror(error));
    return -1;
}

struct stat
{
    stat_log_t calls;
    char name[STAT_NAME_MAX_LEN];
    int mode, level, has_limits, has_last;
    clockid_t clock;
    int64_t period, low, high;
    struct timespec began, last;
    int64_t count, sum, min, max, below, above;
};

static struct stat *of(stat_log_t *stat)
{
    return (struct stat *)stat;
}

static void begin(struct stat *stat)
{
    stat->count = stat->sum = stat->min = stat->max = stat->below = stat->above = 0;
    clock_gettime(stat->clock, &stat->began);
}

static int stat_init(stat_log_t *stat)
{
    of(stat)->has_last = 0;
    begin(of(stat));
    return 0;
}

static int64_t stat_avg(stat_log_t *stat)
{
    return of(stat)->count > 0 ? of(stat)->sum / of(stat)->count : 0;
}

static int stat_print(stat_log_t *calls)
{
    struct stat *stat = of(calls);
    nvlog_c_print(stat->level, NVLOG_TAG_BASE_NVLOG, "%s: %lld values, mean %lld, min %lld, max %lld, %lld below and %lld above the limits",
                  stat->name, (long long)stat->count, (long long)stat_avg(calls), (long long)stat->min,
                  (long long)stat->max, (long long)stat->below, (long long)stat->above);
    return 0;
}

static int stat_add(stat_log_t *calls, int64_t value)
{
    struct stat *stat = of(calls);
    stat->min = stat->count == 0 || value < stat->min ? value : stat->min;
    stat->max = stat->count == 0 || value > stat->max ? value : stat->max;
    stat->count++;
    stat->sum += value;
    if (stat->has_limits) {
        stat->below += value < stat->low;
        stat->above += value > stat->high;
    }
    int is_over = stat->mode == STAT_MODE_COUNTER && stat->count >= stat->period;
    if (stat->mode == STAT_MODE_TIMER) {
        struct timespec now;
        clock_gettime(stat->clock, &now);
        is_over = nvlog_timespec_interval(&stat->began, &now) >= stat->period;
    }
    if (is_over) {
        stat_print(calls);
        begin(stat);
    }
    return is_over;
}

static int stat_interval(stat_log_t *calls)
{
    struct stat *stat = of(calls);
    struct timespec now;
    clock_gettime(stat->clock, &now);
    int is_over = stat->has_last ? stat_add(calls, nvlog_timespec_interval(&stat->last, &now)) : 0;
    stat->last = now;
    stat->has_last = 1;
    return is_over;
}

static int stat_clock(stat_log_t *stat, clockid_t clock)
{
    of(stat)->clock = clock;
    return stat_init(stat);
}

static int stat_level(stat_log_t *stat, int level)
{
    of(stat)->level = level;
    return 0;
}

static int stat_limit(stat_log_t *stat, int64_t min, int64_t max)
{
    of(stat)->low = min;
    of(stat)->high = max;
    of(stat)->has_limits = 1;
    return 0;
}

static int32_t stat_count(stat_log_t *stat)
{
    return (int32_t)of(stat)->count;
}

static int64_t stat_min(stat_log_t *stat)
{
    return of(stat)->min;
}

static int64_t stat_max(stat_log_t *stat)
{
    return of(stat)->max;
}

static int stat_close(stat_log_t *stat)
{
    free(stat);
    return 0;
}

stat_log_t *stat_log_open(const char *name, int mode, int64_t period)
{
    struct stat *stat = calloc(1, sizeof(*stat));
    if (stat == NULL)
        return NULL;
    stat->calls = (stat_log_t){stat_init,  stat_add,   stat_interval, stat_clock, stat_level, stat_limit,
                               stat_count, stat_min,   stat_max,      stat_avg,   stat_print, stat_close};
    nvlog_safe_strncpy(stat->name, name, sizeof(stat->name));
    stat->mode = mode;
    stat->level = NVLOG_CONSOLE;
    stat->clock = CLOCK_MONOTONIC;
    stat->period = period;
    stat_init(&stat->calls);
    return &stat->calls;
}

int assert_time_order(struct timespec ts_old, struct timespec ts_new)
{
    return nvlog_timespec_interval(&ts_old, &ts_new) >= 0;
}
