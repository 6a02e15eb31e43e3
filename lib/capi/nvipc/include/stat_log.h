/* Logs count, minimum, maximum and mean of values once per period. In libnvipc.so and libnvlog.so. One thread at a time. */
#ifndef STAT_LOG_H_INCLUDED_
#define STAT_LOG_H_INCLUDED_

#include <stdint.h>
#include <time.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define STAT_NAME_MAX_LEN (32)

/* The unit of a period: a number of values, or nanoseconds. */
typedef enum
{
    STAT_MODE_NONE = 0,
    STAT_MODE_COUNTER = 1,
    STAT_MODE_TIMER = 2,
    STAT_MODE_MAX = 3
} print_mode_t;

typedef struct stat_log_t stat_log_t;
struct stat_log_t
{
    /* Starts over. */
    int (*init)(stat_log_t *stat);
    /* Adds a value. Returns 1 if it ends a period, else 0. */
    int (*add)(stat_log_t *stat, int64_t value);
    /* Adds the nanoseconds since the last call. The first call only starts the clock. */
    int (*time_interval)(stat_log_t *stat);
    int (*set_clock_source)(stat_log_t *stat, clockid_t clock);
    int (*set_log_level)(stat_log_t *stat, int log_level);
    /* Values outside these limits are counted. */
    int (*set_limit)(stat_log_t *stat, int64_t min, int64_t max);
    int32_t (*get_counter)(stat_log_t *stat);
    int64_t (*get_min_value)(stat_log_t *stat);
    int64_t (*get_max_value)(stat_log_t *stat);
    int64_t (*get_avg_value)(stat_log_t *stat);
    int (*print)(stat_log_t *stat);
    /* Frees the log. */
    int (*close)(stat_log_t *stat);
};

/* NULL if memory is short. */
stat_log_t *stat_log_open(const char *name, int mode, int64_t period);

/* 0 if the first time is not later than the second, else -1. */
int assert_time_order(struct timespec ts_old, struct timespec ts_new);

#if defined(__cplusplus)
}
#endif

#endif
