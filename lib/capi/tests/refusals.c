/* What must be refused, with its code and a text; and the link goes on as if it had not been asked. */
#include "check.h"

#define REFUSED(code, call)                                                     \
    do {                                                                        \
        CHECK((call) == (code));                                                \
        CHECK(strlen(shmesh_last_error()) > 10);                                \
    } while (0)

static shmesh_link_t *phy, *mac;

static void nulls(void)
{
    shmesh_config_t *config;
    shmesh_link_t *link;
    shmesh_loan_t loan;
    shmesh_message_t message;
    int fd;
    const shmesh_error_t no = SHMESH_ERROR_ARGUMENT;
    OK(shmesh_config_default("defaults", &config));
    REFUSED(no, shmesh_config_from_yaml(NULL, &config));
    CHECK(config == NULL);
    REFUSED(no, shmesh_config_from_yaml("links: []", NULL));
    REFUSED(no, shmesh_config_from_file(NULL, &config));
    REFUSED(no, shmesh_config_from_file("x", NULL));
    REFUSED(no, shmesh_config_default(NULL, &config));
    REFUSED(no, shmesh_config_default("a/b", &config));
    REFUSED(no, shmesh_config_default("\xff\xfe", &config));
    CHECK(shmesh_config_count(NULL) == 0 && shmesh_config_name(NULL, 0) == NULL);
    shmesh_config_free(NULL);
    REFUSED(no, shmesh_link_create(NULL, 0, NULL, &link));
    CHECK(link == NULL);
    REFUSED(no, shmesh_link_attach(NULL, SHMESH_SECONDARY, NULL, &link));
    REFUSED(no, shmesh_link_attach("refusals", SHMESH_SECONDARY, NULL, NULL));
    REFUSED(no, shmesh_link_attach("refusals", 2, NULL, &link));
    REFUSED(no, shmesh_link_clone(NULL, &link));
    REFUSED(no, shmesh_link_clone(phy, NULL));
    OK(shmesh_link_close(NULL));
    CHECK(shmesh_link_name(NULL) == NULL);
    REFUSED(no, shmesh_link_pool(NULL, 0, NULL, NULL));
    OK(shmesh_link_pool(phy, SHMESH_CPU_MSG, NULL, NULL));
    REFUSED(no, shmesh_link_queued(NULL, NULL));
    REFUSED(no, shmesh_link_queued(phy, NULL));
    REFUSED(no, shmesh_link_recover(NULL));
    REFUSED(no, shmesh_link_notify(NULL));
    REFUSED(no, shmesh_link_wait(NULL, 0));
    REFUSED(no, shmesh_link_post(NULL));
    REFUSED(no, shmesh_link_wait_post(NULL, 0));
    REFUSED(no, shmesh_link_fd(NULL, &fd));
    REFUSED(no, shmesh_link_fd(phy, NULL));
    REFUSED(no, shmesh_link_take_signal(NULL));
    REFUSED(no, shmesh_link_loan(NULL, SHMESH_NO_DATA, &loan));
    REFUSED(SHMESH_ERROR_ENDED, shmesh_loan_drop(&loan));
    REFUSED(no, shmesh_link_loan(phy, SHMESH_NO_DATA, NULL));
    REFUSED(no, shmesh_loan_send(NULL, 0, 0, 0, 0));
    REFUSED(no, shmesh_loan_drop(NULL));
    REFUSED(no, shmesh_link_send_inline(NULL, 0, 0, "", 0));
    REFUSED(no, shmesh_link_send_inline(phy, 0, 0, NULL, 1));
    REFUSED(no, shmesh_link_send_inline(phy, 0, 0, "", SIZE_MAX));
    REFUSED(no, shmesh_link_receive(NULL, &message));
    REFUSED(SHMESH_ERROR_ENDED, shmesh_message_release(&message));
    REFUSED(no, shmesh_link_receive(phy, NULL));
    REFUSED(no, shmesh_message_release(NULL));
}

static void lengths_and_pools(void)
{
    shmesh_loan_t loan, one_more;
    uint32_t size = 7, len = 7;
    OK(shmesh_link_pool(mac, SHMESH_CPU_LARGE, &size, &len));
    CHECK(size == 65536 && len == 4);
    REFUSED(SHMESH_ERROR_NO_POOL, shmesh_link_pool(mac, SHMESH_GPU_DATA, &size, &len));
    REFUSED(SHMESH_ERROR_ARGUMENT, shmesh_link_pool(mac, 5, &size, &len));
    REFUSED(SHMESH_ERROR_ARGUMENT, shmesh_link_loan(mac, 5, &loan));
    REFUSED(SHMESH_ERROR_NO_POOL, shmesh_link_loan(mac, SHMESH_CPU_MSG, &loan));
    REFUSED(SHMESH_ERROR_NO_POOL, shmesh_link_loan(mac, SHMESH_CUDA_DATA, &loan));
    CHECK(loan.msg == NULL);

    OK(shmesh_link_loan(mac, SHMESH_CPU_DATA, &loan));
    REFUSED(SHMESH_ERROR_TOO_LONG, shmesh_loan_send(&loan, 0, 0, 513, 0));
    REFUSED(SHMESH_ERROR_TOO_LONG, shmesh_loan_send(&loan, 0, 0, 0, 4097));
    REFUSED(SHMESH_ERROR_TOO_LONG, shmesh_loan_send(&loan, 0, 0, SIZE_MAX, SIZE_MAX));
    /* Still a loan, and the handle cannot go while it is. */
    REFUSED(SHMESH_ERROR_HELD, shmesh_link_close(mac));
    OK(shmesh_loan_drop(&loan));
    REFUSED(SHMESH_ERROR_ENDED, shmesh_loan_drop(&loan));
    REFUSED(SHMESH_ERROR_ENDED, shmesh_loan_send(&loan, 0, 0, 0, 0));
    OK(shmesh_link_loan(mac, SHMESH_NO_DATA, &loan));
    REFUSED(SHMESH_ERROR_NO_POOL, shmesh_loan_send(&loan, 0, 0, 0, 1));
    OK(shmesh_loan_drop(&loan));
    char long_one[113] = {0};
    REFUSED(SHMESH_ERROR_TOO_LONG, shmesh_link_send_inline(mac, 0, 0, long_one, sizeof(long_one)));

    shmesh_loan_t all[4];
    for (int i = 0; i < 4; i++)
        OK(shmesh_link_loan(mac, SHMESH_CPU_LARGE, &all[i]));
    for (int i = 0; i < 40; i++)
        REFUSED(SHMESH_ERROR_EXHAUSTED, shmesh_link_loan(mac, SHMESH_CPU_LARGE, &one_more));
    for (int i = 0; i < 4; i++)
        OK(shmesh_loan_drop(&all[i]));

    /* The ring is full: nothing is lost, and the loan stays. */
    for (int i = 0; i < 16; i++)
        OK(shmesh_link_send_inline(mac, i, 0, NULL, 0));
    OK(shmesh_link_loan(mac, SHMESH_NO_DATA, &loan));
    REFUSED(SHMESH_ERROR_FULL, shmesh_loan_send(&loan, 16, 0, 0, 0));
    shmesh_message_t got;
    for (int i = 0; i < 16; i++) {
        size_t queued;
        OK(shmesh_link_queued(phy, &queued));
        CHECK(queued == 16 - (size_t)i);
        OK(shmesh_link_receive(phy, &got));
        CHECK(got.msg_id == i && got.msg_len == 0);
        REFUSED(SHMESH_ERROR_HELD, shmesh_link_close(phy));
        OK(shmesh_message_release(&got));
        REFUSED(SHMESH_ERROR_ENDED, shmesh_message_release(&got));
    }
    OK(shmesh_loan_send(&loan, 16, 0, 0, 0));
    OK(shmesh_link_receive(phy, &got));
    CHECK(got.msg_id == 16);
    OK(shmesh_message_release(&got));
    CHECK(shmesh_link_receive(phy, &got) == SHMESH_ERROR_EMPTY);
    CHECK(shmesh_link_wait(phy, 1000000) == SHMESH_ERROR_TIMEOUT);
    CHECK(shmesh_link_wait_post(phy, 0) == SHMESH_ERROR_TIMEOUT);
    CHECK(shmesh_link_take_signal(phy) == SHMESH_ERROR_EMPTY);
}

static void configurations(void)
{
    static const char *const wrong[] = {"", "links: 3", "links:\n  - name: a b", "%", "a: [", "transport: 7",
                                        "links:\n  - name: x\n    rnig: { len: 4 }"};
    shmesh_config_t *config;
    shmesh_link_t *link;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        REFUSED(SHMESH_ERROR_CONFIG, shmesh_config_from_yaml(wrong[i], &config));
    CHECK(strstr(shmesh_last_error(), "--> yaml:3:") != NULL);
    REFUSED(SHMESH_ERROR_CONFIG, shmesh_config_from_file("/nowhere/at/all.yaml", &config));
    OK(shmesh_config_from_yaml("transport: { type: shm, shm_config: { prefix: of-nvipc } }", &config));
    CHECK(strcmp(shmesh_config_name(config, 0), "of-nvipc") == 0 && shmesh_config_name(config, 1) == NULL);
    REFUSED(SHMESH_ERROR_ARGUMENT, shmesh_link_create(config, 1, NULL, &link));
    shmesh_config_free(config);
    OK(shmesh_config_default("refusals", &config));
    REFUSED(SHMESH_ERROR_DIFFERS, shmesh_link_create(config, 0, NULL, &link));
    shmesh_options_t options;
    memset(&options, 0, sizeof(options));
    options.dir = "/nowhere";
    REFUSED(SHMESH_ERROR_NOT_FOUND, shmesh_link_create(config, 0, &options, &link));
    shmesh_config_free(config);
    REFUSED(SHMESH_ERROR_NOT_FOUND, shmesh_link_attach("missing", SHMESH_SECONDARY, NULL, &link));
    CHECK(strstr(shmesh_last_error(), "missing") != NULL);
    REFUSED(SHMESH_ERROR_ARGUMENT, shmesh_link_attach("../missing", SHMESH_SECONDARY, NULL, &link));
}

static void every_code_has_a_text(void)
{
    for (int code = SHMESH_OK; code <= SHMESH_ERROR_UNWANTED; code++)
        for (int other = code + 1; other <= SHMESH_ERROR_UNWANTED + 1; other++)
            CHECK(strcmp(shmesh_error_string(code), shmesh_error_string(other)) != 0);
    CHECK(strcmp(shmesh_error_string(-1), shmesh_error_string(12345)) == 0);
}

static void *sleeper(void *link)
{
    shmesh_error_t waited;
    /* The other one looks whether we are in already. */
    do
        waited = shmesh_link_wait((shmesh_link_t *)link, -1);
    while (waited == SHMESH_ERROR_BUSY);
    CHECK(waited == SHMESH_OK);
    return NULL;
}

/* One handle in two threads is refused; a clone is a handle of its own. */
static void threads(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleeper, phy) == 0);
    size_t queued;
    while (shmesh_link_queued(phy, &queued) == SHMESH_OK)
        sched_yield();
    REFUSED(SHMESH_ERROR_BUSY, shmesh_link_notify(phy));
    REFUSED(SHMESH_ERROR_BUSY, shmesh_link_close(phy));
    OK(shmesh_link_send_inline(mac, 1, 0, "x", 1));
    OK(shmesh_link_notify(mac));
    CHECK(pthread_join(thread, NULL) == 0);
    shmesh_link_t *clone;
    OK(shmesh_link_clone(phy, &clone));
    shmesh_message_t got;
    OK(shmesh_link_receive(clone, &got));
    OK(shmesh_message_release(&got));
    OK(shmesh_link_recover(clone));
    OK(shmesh_link_close(clone));
}

/* Who creates knows whether the link was there, and may have it empty. */
/* Leaves a message, and does not close. */
static void leave_message(void)
{
    shmesh_link_t *link = created("fresh");
    OK(shmesh_link_send_inline(link, 1, 0, "old", 3));
    _exit(0);
}

static void fresh(void)
{
    shmesh_link_t *first = created("fresh"), *second, *again;
    bool was_created = false;
    OK(shmesh_link_was_created(first, &was_created));
    CHECK(was_created);
    REFUSED(SHMESH_ERROR_ARGUMENT, shmesh_link_was_created(first, NULL));
    second = attached("fresh");
    OK(shmesh_link_was_created(second, &was_created));
    CHECK(!was_created);
    OK(shmesh_link_send_inline(second, 1, 0, "old", 3));
    OK(shmesh_link_send_inline(first, 1, 0, "old", 3));
    OK(shmesh_link_close(second));

    shmesh_config_t *config;
    shmesh_options_t options;
    size_t count;
    memset(&options, 0, sizeof(options));
    options.fresh = true;
    OK(shmesh_config_from_yaml(small_link("fresh"), &config));
    REFUSED(SHMESH_ERROR_TAKEN, shmesh_link_create(config, 0, &options, &again));
    CHECK(strstr(shmesh_last_error(), "fresh") != NULL);
    OK(shmesh_link_close(first));

    /* The last participant removed the link, so a child leaves messages and ends without closing. */
    succeeds(start_again("leaver", NULL, NULL));
    OK(shmesh_link_create(config, 0, &options, &first));
    OK(shmesh_link_was_created(first, &was_created));
    CHECK(!was_created);
    second = attached("fresh");
    OK(shmesh_link_queued(first, &count));
    CHECK(count == 0);
    OK(shmesh_link_queued(second, &count));
    CHECK(count == 0);
    OK(shmesh_link_close(second));
    OK(shmesh_link_close(first));
    shmesh_config_free(config);
}

static void be_second_receiver(void)
{
    shmesh_link_t *second;
    REFUSED(SHMESH_ERROR_TAKEN, shmesh_link_attach("one", SHMESH_SECONDARY, NULL, &second));
    CHECK(strstr(shmesh_last_error(), "receivers: one") != NULL);
    _exit(0);
}

/* A link with one receiver a side refuses a second process there. */
static void one_receiver(void)
{
    shmesh_config_t *config;
    shmesh_link_t *first, *second, *same;
    OK(shmesh_config_from_yaml("links:\n  - { name: one, receivers: one }\n", &config));
    OK(shmesh_link_create(config, 0, NULL, &first));
    second = attached("one");
    same = attached("one");
    succeeds(start_again("second receiver", NULL, NULL));
    OK(shmesh_link_close(same));
    OK(shmesh_link_close(second));
    OK(shmesh_link_close(first));
    shmesh_config_free(config);
}

static int waiting;

/* Without a place of its own on the stack: the address sanitizer does not see that it ends. */
static void *cancelled(void *link)
{
    __atomic_fetch_add(&waiting, 1, __ATOMIC_RELEASE);
    for (;;) {
        CHECK(shmesh_link_wait((shmesh_link_t *)link, 50000000) == SHMESH_ERROR_TIMEOUT);
        CHECK(shmesh_link_wait_post((shmesh_link_t *)link, 50000000) == SHMESH_ERROR_TIMEOUT);
        pthread_testcancel();
    }
}

/* It ends between two calls, and the handle is free. */
static void cancel_threads(void)
{
    shmesh_link_t *link = created("cancelled");
    for (int turn = 1; turn <= 10; turn++) {
        pthread_t thread;
        void *ended;
        CHECK(pthread_create(&thread, NULL, cancelled, link) == 0);
        while (__atomic_load_n(&waiting, __ATOMIC_ACQUIRE) < turn)
            sched_yield();
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &ended) == 0 && ended == PTHREAD_CANCELED);
    }
    CHECK(shmesh_link_wait(link, 0) == SHMESH_ERROR_TIMEOUT);
    OK(shmesh_link_close(link));
}

int main(int argc, char **argv)
{
    begin();
    if (argc > 1 && strcmp(argv[1], "leaver") == 0)
        leave_message();
    if (argc > 1)
        be_second_receiver();
    cancel_threads();
    phy = created("refusals");
    mac = attached("refusals");
    nulls();
    lengths_and_pools();
    configurations();
    every_code_has_a_text();
    threads();
    fresh();
    one_receiver();
    OK(shmesh_link_close(mac));
    OK(shmesh_link_close(phy));
    return 0;
}
