/* What the programs here share: checks that end the program, and small links. Read by C and by C++. */
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shmesh.h"

#define CHECK(so)                                                                                    \
    do {                                                                                             \
        if (!(so)) {                                                                                 \
            fprintf(stderr, "%s:%d: failed: %s (%s)\n", __FILE__, __LINE__, #so, shmesh_last_error()); \
            _exit(1);                                                                                \
        }                                                                                            \
    } while (0)

#define OK(call) CHECK((call) == SHMESH_OK)

#include "again.h"

/* The configuration of a small link. */
static inline const char *small_link(const char *name)
{
    static char yaml[512];
    snprintf(yaml, sizeof(yaml),
             "links:\n  - name: %s\n    ring: { len: 16 }\n    pools:\n"
             "      cpu_msg: { buf_size_bytes: 512, pool_len: 16 }\n"
             "      cpu_data: { buf_size_bytes: 4096, pool_len: 8 }\n"
             "      cpu_large: { buf_size_bytes: 65536, pool_len: 4 }\n",
             name);
    return yaml;
}

static inline shmesh_link_t *created(const char *name)
{
    shmesh_config_t *config;
    shmesh_link_t *link;
    OK(shmesh_config_from_yaml(small_link(name), &config));
    CHECK(shmesh_config_count(config) == 1 && strcmp(shmesh_config_name(config, 0), name) == 0);
    OK(shmesh_link_create(config, 0, NULL, &link));
    shmesh_config_free(config);
    CHECK(strcmp(shmesh_link_name(link), name) == 0);
    return link;
}

static inline shmesh_link_t *attached(const char *name)
{
    shmesh_options_t options;
    memset(&options, 0, sizeof(options));
    options.timeout_ns = HANGS_S * 1000000000ULL;
    shmesh_link_t *link;
    OK(shmesh_link_attach(name, SHMESH_SECONDARY, &options, &link));
    return link;
}

#endif
