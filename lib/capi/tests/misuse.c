/* Every misuse of a handle, loan or message gets a code, and the link goes on as if it had not been. Nothing here may read or
 * write memory that is not the program's: it runs under the sanitizers too. */
#include "check.h"

static shmesh_link_t *phy, *mac;

static size_t queued(shmesh_link_t *link)
{
    size_t count;
    OK(shmesh_link_queued(link, &count));
    return count;
}

static void one_message(void)
{
    shmesh_loan_t loan;
    OK(shmesh_link_loan(mac, SHMESH_CPU_DATA, &loan));
    OK(shmesh_loan_send(&loan, 1, 2, 3, 4));
}

#define ENDED(call) CHECK((call) == SHMESH_ERROR_ENDED)

/* A copy is the same loan or message: whichever ends first ends both. */
static void copies(void)
{
    shmesh_loan_t loan, copy;
    OK(shmesh_link_loan(mac, SHMESH_CPU_DATA, &loan));
    copy = loan;
    OK(shmesh_loan_send(&copy, 1, 0, 1, 1));
    ENDED(shmesh_loan_send(&loan, 1, 0, 1, 1));
    ENDED(shmesh_loan_drop(&loan));
    ENDED(shmesh_loan_drop(&copy));
    CHECK(queued(phy) == 1);

    shmesh_message_t message, same;
    OK(shmesh_link_receive(phy, &message));
    same = message;
    CHECK(shmesh_link_close(phy) == SHMESH_ERROR_HELD);
    OK(shmesh_message_release(&same));
    ENDED(shmesh_message_release(&message));
    ENDED(shmesh_message_release(&same));

    /* The place of what has ended is another's now: the old copy does not end that. */
    OK(shmesh_link_loan(mac, SHMESH_NO_DATA, &loan));
    copy = loan;
    OK(shmesh_loan_drop(&loan));
    OK(shmesh_link_loan(mac, SHMESH_NO_DATA, &loan));
    ENDED(shmesh_loan_send(&copy, 1, 0, 0, 0));
    ENDED(shmesh_loan_drop(&copy));
    OK(shmesh_loan_send(&loan, 5, 0, 0, 0));
    OK(shmesh_link_receive(phy, &message));
    CHECK(message.msg_id == 5);
    OK(shmesh_message_release(&message));
    CHECK(queued(phy) == 0);
}

/* Any bits at all, in loans, messages and handles. */
static void garbage(void)
{
    shmesh_loan_t loan;
    shmesh_message_t message;
    for (int byte = 0; byte < 256; byte++) {
        memset(&loan, byte, sizeof(loan));
        memset(&message, byte, sizeof(message));
        ENDED(shmesh_loan_send(&loan, 0, 0, 0, 0));
        ENDED(shmesh_loan_drop(&loan));
        ENDED(shmesh_message_release(&message));
    }
    /* A real handle, and words that are not its; a real loan, and another handle. */
    shmesh_loan_t given, bent;
    OK(shmesh_link_loan(mac, SHMESH_NO_DATA, &given));
    for (int bit = 0; bit < 128; bit++) {
        bent = given;
        bent.private_words[bit / 64] ^= 1ULL << bit % 64;
        ENDED(shmesh_loan_drop(&bent));
    }
    for (int bit = 0; bit < 64; bit++) {
        bent = given;
        bent.private_link = (const shmesh_link_t *)((uintptr_t)given.private_link ^ (uintptr_t)1 << bit);
        ENDED(shmesh_loan_drop(&bent));
    }
    bent = given;
    bent.private_link = phy;
    ENDED(shmesh_loan_send(&bent, 0, 0, 0, 0));
    /* A loan is no message. */
    memset(&message, 0, sizeof(message));
    memcpy(message.private_words, given.private_words, sizeof(given.private_words));
    message.private_link = given.private_link;
    ENDED(shmesh_message_release(&message));
    OK(shmesh_loan_drop(&given));

    size_t count;
    int on_the_stack;
    shmesh_link_t *wild[] = {(shmesh_link_t *)1, (shmesh_link_t *)&on_the_stack, (shmesh_link_t *)-1,
                             (shmesh_link_t *)((uintptr_t)1 << 63 | 0xfffff), (shmesh_link_t *)stderr};
    for (size_t i = 0; i < sizeof(wild) / sizeof(wild[0]); i++) {
        ENDED(shmesh_link_queued(wild[i], &count));
        ENDED(shmesh_link_close(wild[i]));
        CHECK(shmesh_link_name(wild[i]) == NULL);
        shmesh_config_free((shmesh_config_t *)wild[i]);
        CHECK(shmesh_config_count((shmesh_config_t *)wild[i]) == 0);
    }
}

/* Each call on a closed handle, also when a new one has its place in the table. */
static void closed_handles(void)
{
    shmesh_link_t *gone, *next, *clone;
    shmesh_loan_t loan;
    shmesh_message_t message;
    size_t count;
    int fd;
    OK(shmesh_link_clone(mac, &gone));
    const char *name = shmesh_link_name(gone);
    OK(shmesh_link_loan(gone, SHMESH_NO_DATA, &loan));
    shmesh_loan_t copy = loan;
    CHECK(shmesh_link_close(gone) == SHMESH_ERROR_HELD);
    OK(shmesh_loan_drop(&loan));
    OK(shmesh_link_close(gone));
    /* This was a use after free. */
    ENDED(shmesh_loan_drop(&copy));
    ENDED(shmesh_loan_send(&copy, 0, 0, 0, 0));
    for (int turn = 0; turn < 2; turn++) {
        ENDED(shmesh_link_close(gone));
        ENDED(shmesh_link_clone(gone, &clone));
        CHECK(clone == NULL && shmesh_link_name(gone) == NULL);
        ENDED(shmesh_link_pool(gone, SHMESH_CPU_MSG, NULL, NULL));
        ENDED(shmesh_link_queued(gone, &count));
        ENDED(shmesh_link_recover(gone));
        ENDED(shmesh_link_notify(gone));
        ENDED(shmesh_link_wait(gone, -1));
        ENDED(shmesh_link_post(gone));
        ENDED(shmesh_link_wait_post(gone, -1));
        ENDED(shmesh_link_fd(gone, &fd));
        ENDED(shmesh_link_take_signal(gone));
        ENDED(shmesh_link_loan(gone, SHMESH_NO_DATA, &loan));
        ENDED(shmesh_loan_drop(&loan));
        ENDED(shmesh_link_send_inline(gone, 0, 0, "x", 1));
        ENDED(shmesh_link_receive(gone, &message));
        ENDED(shmesh_message_release(&message));
        if (turn == 0)
            OK(shmesh_link_clone(mac, &next));
    }
    /* The name outlives the handle. */
    CHECK(next != gone && strcmp(name, shmesh_link_name(next)) == 0);
    OK(shmesh_link_close(next));

    shmesh_config_t *config;
    OK(shmesh_config_default("freed", &config));
    name = shmesh_config_name(config, 0);
    shmesh_config_free(config);
    shmesh_config_free(config);
    CHECK(strcmp(name, "freed") == 0 && shmesh_config_count(config) == 0 && shmesh_config_name(config, 0) == NULL);
    ENDED(shmesh_link_create(config, 0, NULL, &next));
}

static shmesh_link_t *contested;
static pthread_barrier_t at_once;
static int closed;

static void *closer(void *loan)
{
    pthread_barrier_wait(&at_once);
    for (;;) {
        shmesh_error_t error = shmesh_link_close(contested);
        if (error == SHMESH_OK)
            __atomic_fetch_add(&closed, 1, __ATOMIC_RELAXED);
        if (error == SHMESH_OK || error == SHMESH_ERROR_ENDED)
            break;
        CHECK(error == SHMESH_ERROR_BUSY || error == SHMESH_ERROR_HELD);
        if (error == SHMESH_ERROR_HELD) {
            error = shmesh_loan_drop((shmesh_loan_t *)loan);
            CHECK(error == SHMESH_OK || error == SHMESH_ERROR_ENDED || error == SHMESH_ERROR_BUSY);
        }
    }
    size_t count;
    shmesh_error_t error = shmesh_link_queued(contested, &count);
    CHECK(error == SHMESH_ERROR_ENDED);
    return NULL;
}

/* Of threads that close one handle at once, one closes it; calls of others are refused. */
static void closed_by_several(void)
{
    enum { THREADS = 4 };
    for (int turn = 0; turn < 50; turn++) {
        pthread_t threads[THREADS];
        shmesh_loan_t loans[THREADS];
        OK(shmesh_link_clone(mac, &contested));
        closed = 0;
        memset(loans, 0, sizeof(loans));
        if (turn % 2 == 0)
            OK(shmesh_link_loan(contested, SHMESH_NO_DATA, &loans[0]));
        for (int i = 1; i < THREADS; i++)
            loans[i] = loans[0];
        CHECK(pthread_barrier_init(&at_once, NULL, THREADS) == 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, closer, &loans[i]) == 0);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(closed == 1);
        pthread_barrier_destroy(&at_once);
    }
}

/* More handles at once than the table has in its first piece. */
static void many_handles(void)
{
    enum { MANY = 100 };
    shmesh_link_t *handles[MANY], *other = created("misuse-other");
    for (int i = 0; i < MANY; i++)
        OK(shmesh_link_clone(i < MANY / 2 ? mac : other, &handles[i]));
    for (int i = 0; i < MANY / 2; i++) {
        shmesh_message_t message;
        OK(shmesh_link_send_inline(handles[i], i, 0, NULL, 0));
        OK(shmesh_link_receive(phy, &message));
        CHECK(message.msg_id == i);
        OK(shmesh_message_release(&message));
    }
    for (int i = 0; i < MANY; i++)
        OK(shmesh_link_close(handles[i]));
    for (int i = 0; i < MANY; i++)
        ENDED(shmesh_link_close(handles[i]));
    OK(shmesh_link_close(other));
}

/* What is refused holds no buffer: here the only one. */
static void refused_loans(void)
{
    shmesh_config_t *config;
    shmesh_link_t *link;
    OK(shmesh_config_from_yaml("links:\n  - name: misuse-device\n    ring: { len: 16 }\n    backing: memfd\n    pools:\n"
                               "      cpu_msg: { buf_size_bytes: 512, pool_len: 1 }\n"
                               "      cuda_data: { buf_size_bytes: 4096, pool_len: 1 }\n",
                               &config));
    OK(shmesh_link_create(config, 0, NULL, &link));
    shmesh_loan_t loan;
    CHECK(shmesh_link_loan(link, SHMESH_CUDA_DATA, &loan) == SHMESH_ERROR_NO_POOL);
    OK(shmesh_link_loan(link, SHMESH_NO_DATA, &loan));
    OK(shmesh_loan_drop(&loan));
    OK(shmesh_link_close(link));
    shmesh_config_free(config);
}

/* A thread that is cancelled while it asks who has the role that it needs: not inside of the call. */
static void *refused_receiver(void *link)
{
    /* Not on the stack: the address sanitizer takes a cancelled thread's for one that is in use. */
    static shmesh_message_t message;
    for (;;) {
        CHECK(shmesh_link_receive((shmesh_link_t *)link, &message) == SHMESH_ERROR_TAKEN);
        pthread_testcancel();
    }
    return NULL;
}

static void cancelled_receivers(void)
{
    shmesh_config_t *config;
    shmesh_link_t *link, *second;
    OK(shmesh_config_from_yaml("links:\n  - name: misuse-single\n    ring: { len: 16, mode: spsc }\n    pools:\n"
                               "      cpu_msg: { buf_size_bytes: 512, pool_len: 16 }\n",
                               &config));
    OK(shmesh_link_create(config, 0, NULL, &link));
    OK(shmesh_link_clone(link, &second));
    shmesh_message_t message;
    CHECK(shmesh_link_receive(link, &message) == SHMESH_ERROR_EMPTY);
    for (int i = 0; i < 50; i++) {
        pthread_t thread;
        void *ended;
        CHECK(pthread_create(&thread, NULL, refused_receiver, second) == 0);
        usleep(500);
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &ended) == 0 && ended == PTHREAD_CANCELED);
    }
    OK(shmesh_link_close(second));
    OK(shmesh_link_close(link));
    shmesh_config_free(config);
}

#ifndef __SANITIZE_ADDRESS__
static int churning = 1;

static void *churn(void *link)
{
    while (__atomic_load_n(&churning, __ATOMIC_RELAXED)) {
        shmesh_config_t *config;
        shmesh_link_t *clone;
        OK(shmesh_config_default("misuse-churn", &config));
        shmesh_config_free(config);
        OK(shmesh_link_clone((shmesh_link_t *)link, &clone));
        OK(shmesh_link_close(clone));
    }
    return NULL;
}

/* A child has handles of its own, whatever the threads of its parent were doing. */
static void forked_children(void)
{
    enum { CHURNING = 3 };
    pthread_t threads[CHURNING];
    shmesh_link_t *links[CHURNING];
    for (int i = 0; i < CHURNING; i++) {
        OK(shmesh_link_clone(mac, &links[i]));
        CHECK(pthread_create(&threads[i], NULL, churn, links[i]) == 0);
    }
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(HANGS_S / 2);
            shmesh_config_t *config;
            OK(shmesh_config_default("misuse-child", &config));
            shmesh_link_t *link = attached("misuse");
            OK(shmesh_link_close(link));
            shmesh_config_free(config);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    __atomic_store_n(&churning, 0, __ATOMIC_RELAXED);
    for (int i = 0; i < CHURNING; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        OK(shmesh_link_close(links[i]));
    }
}
#endif

int main(void)
{
    begin();
    phy = created("misuse");
    mac = attached("misuse");
    copies();
    garbage();
    closed_handles();
    closed_by_several();
    many_handles();
    refused_loans();
    cancelled_receivers();
#ifndef __SANITIZE_ADDRESS__
    /* Its own locks are not for children of a process with threads. */
    forked_children();
#endif

    /* And nothing was lost or counted twice: all 16 buffers go round. */
    for (int i = 0; i < 64; i++) {
        shmesh_message_t message;
        one_message();
        OK(shmesh_link_receive(phy, &message));
        CHECK(message.msg_id == 1 && message.cell_id == 2 && message.msg_len == 3 && message.data_len == 4);
        OK(shmesh_message_release(&message));
    }
    shmesh_loan_t all[8];
    for (int i = 0; i < 8; i++)
        OK(shmesh_link_loan(mac, SHMESH_CPU_DATA, &all[i]));
    for (int i = 0; i < 8; i++)
        OK(shmesh_loan_drop(&all[i]));
    OK(shmesh_link_close(mac));
    OK(shmesh_link_close(phy));
    return 0;
}
