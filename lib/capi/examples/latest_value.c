/* The latest value: a writer that never waits, and readers that only want to know how things are now.
 *
 * cc latest_value.c $(pkg-config --cflags --libs shmesh) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <shmesh.h>

static const char CONFIG[] = "links:\n"
                             "  - name: position\n"
                             "    ring: { mode: broadcast, len: 2, slow: skip, history: 1 }\n";

static void must(shmesh_error_t result)
{
    if (result != SHMESH_OK) {
        fprintf(stderr, "%s: %s\n", shmesh_error_string(result), shmesh_last_error());
        exit(1);
    }
}

static shmesh_link_t *created(void)
{
    shmesh_config_t *config;
    shmesh_link_t *link;
    must(shmesh_config_from_yaml(CONFIG, &config));
    must(shmesh_link_create(config, 0, NULL, &link));
    shmesh_config_free(config);
    return link;
}

static shmesh_link_t *attached(void)
{
    shmesh_link_t *link;
    must(shmesh_link_attach("position", SHMESH_SECONDARY, NULL, &link));
    return link;
}

static int latest(shmesh_link_t *display)
{
    shmesh_message_t message;
    int position;
    must(shmesh_link_receive(display, &message));
    memcpy(&position, message.msg, sizeof(position));
    must(shmesh_message_release(&message));
    return position;
}

int main(void)
{
    shmesh_link_t *sensor = created();
    shmesh_link_t *display = attached(); /* usually in another process */
    for (int position = 0; position < 1000; position++)
        must(shmesh_link_send_inline(sensor, 1, 0, &position, sizeof(position)));
    uint64_t skipped;
    int position = latest(display);
    must(shmesh_link_lost(display, &skipped));
    printf("the latest of 1000 values is %d; %lu were skipped\n", position, (unsigned long)skipped);

    /* A reader that comes later has it at once. */
    shmesh_link_t *late = attached();
    int same = latest(late);
    must(shmesh_link_close(late));
    must(shmesh_link_close(display));
    must(shmesh_link_close(sensor));
    return position == 999 && same == 999 ? 0 : 1;
}
