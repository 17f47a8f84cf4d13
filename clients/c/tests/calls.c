/* Every function of kvasir.h against a real host, with good arguments and with bad ones. Run by tests/c.rs. */
#include "kvasir.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                                    \
    do {                                                                                               \
        if (!(what)) {                                                                                 \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #what, kvasir_v1_error());         \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)
#define OK(call) CHECK((call) == KVASIR_V1_STATUS_OK)
#define INVALID(call, text)                                                                            \
    do {                                                                                               \
        CHECK((call) == KVASIR_V1_STATUS_INVALID);                                                     \
        CHECK(strstr(kvasir_v1_error(), text) != NULL);                                                \
    } while (0)

enum { LEN = 100000 };
/* Another one in each process, so that each finds the host without its blocks. */
static uint8_t name_space[32];
static kvasir_v1_options options;
static const char *endpoint;

static kvasir_v1_key key_of(const char *hash) {
    kvasir_v1_key key;
    OK(kvasir_v1_key_of(name_space, (const uint8_t *)hash, strlen(hash), &key));
    return key;
}

static void blocks_go_in_and_out(void) {
    static uint8_t bytes[LEN], found[LEN];
    kvasir_v1_client *client = NULL;
    kvasir_v1_put_outcome outcome;
    kvasir_v1_key keys[2] = {key_of("here"), key_of("nowhere")};
    uint8_t answers[2] = {7, 7};
    uint64_t boot = 0;
    uint32_t size = 7;
    for (size_t n = 0; n < LEN; n++) bytes[n] = (uint8_t)(n * 31);

    OK(kvasir_v1_connect(endpoint, &options, &client));
    OK(kvasir_v1_boot(client, &boot));
    CHECK(boot != 0);
    OK(kvasir_v1_get(client, &keys[0], found, LEN, &size));
    CHECK(size == 0);
    OK(kvasir_v1_put(client, &keys[0], bytes, LEN, &outcome));
    CHECK(outcome == KVASIR_V1_PUT_OUTCOME_STORED);
    OK(kvasir_v1_put(client, &keys[0], bytes, LEN, &outcome));
    CHECK(outcome == KVASIR_V1_PUT_OUTCOME_ALREADY_STORED);
    OK(kvasir_v1_put(client, &keys[0], bytes, LEN, NULL));
    OK(kvasir_v1_exists(client, keys, 2, answers));
    CHECK(answers[0] == 1 && answers[1] == 0);
    OK(kvasir_v1_exists(client, NULL, 0, NULL));
    OK(kvasir_v1_hold(client, keys, 2, 60000, answers));
    CHECK(answers[0] == 1 && answers[1] == 0);
    OK(kvasir_v1_release(client, keys, 2, answers));
    CHECK(answers[0] == 1 && answers[1] == 0);
    OK(kvasir_v1_release(client, keys, 1, answers));
    CHECK(answers[0] == 0);

    CHECK(kvasir_v1_get(client, &keys[0], found, LEN - 1, &size) == KVASIR_V1_STATUS_BUFFER);
    CHECK(size == LEN);
    OK(kvasir_v1_get(client, &keys[0], found, LEN, &size));
    CHECK(size == LEN && memcmp(bytes, found, LEN) == 0);
    OK(kvasir_v1_remove(client, keys, 2, answers));
    CHECK(answers[0] == 1 && answers[1] == 0);
    OK(kvasir_v1_get(client, &keys[0], found, LEN, &size));
    CHECK(size == 0);
    OK(kvasir_v1_close(client));
}

/* The jobs that have ended; waits for one. */
static kvasir_v1_done *next(kvasir_v1_jobs *jobs) {
    struct pollfd event = {.events = POLLIN};
    kvasir_v1_done *done = NULL;
    OK(kvasir_v1_jobs_next(jobs, &done));
    if (done != NULL) return done;
    OK(kvasir_v1_jobs_event_fd(jobs, &event.fd));
    while (done == NULL) {
        poll(&event, 1, -1);
        OK(kvasir_v1_jobs_next(jobs, &done));
    }
    return done;
}

static void jobs_save_and_load(void) {
    enum { BLOCKS = 4, RUN = 5000 };
    static uint8_t kv[2][BLOCKS][RUN];
    kvasir_v1_run runs[2] = {{kv[0][0], RUN, RUN}, {kv[1][0], RUN, RUN}};
    uint32_t saved[3] = {0, 1, 2}, loaded[2] = {3, 2}, outside[1] = {BLOCKS};
    kvasir_v1_plan *plan = NULL;
    kvasir_v1_jobs *jobs = NULL;
    kvasir_v1_done *done = NULL;
    const uint8_t *hashes = (const uint8_t *)"hash 0hash 1hash 2", *others = (const uint8_t *)"hash 1hash 9";
    for (size_t n = 0; n < sizeof kv; n++) ((uint8_t *)kv)[n] = (uint8_t)(n * 17 >> 4);

    OK(kvasir_v1_plan_new(runs, 2, BLOCKS, &plan));
    OK(kvasir_v1_jobs_start(endpoint, &options, NULL, &jobs));
    OK(kvasir_v1_jobs_next(jobs, &done));
    CHECK(done == NULL);
    OK(kvasir_v1_jobs_save(jobs, 70, plan, name_space, hashes, 6, saved, 3));
    done = next(jobs);
    CHECK(done->job == 70 && done->ok && done->count == 3 && done->error == NULL);
    CHECK(done->here[0] && done->here[1] && done->here[2] && done->bytes >= 3 * 2 * RUN);
    kvasir_v1_done_free(done);

    /* One is there and one is not. A plan may be freed as soon as its jobs are given. */
    memset(kv[0][2], 0xee, RUN);
    OK(kvasir_v1_jobs_load(jobs, 71, plan, name_space, others, 6, loaded, 2));
    INVALID(kvasir_v1_jobs_load(jobs, 72, plan, name_space, others, 6, outside, 1), "not in the plan");
    INVALID(kvasir_v1_jobs_load(jobs, 72, plan, name_space, others, 0, loaded, 1), "hashes of 0 B");
    INVALID(kvasir_v1_jobs_load(jobs, 72, plan, NULL, others, 6, loaded, 1), "the namespace is null");
    OK(kvasir_v1_plan_free(plan));
    INVALID(kvasir_v1_plan_free(plan), "not the handle of an open plan");
    INVALID(kvasir_v1_jobs_load(jobs, 73, plan, name_space, others, 6, loaded, 1), "open plan");
    done = next(jobs);
    CHECK(done->job == 71 && !done->ok && done->count == 2 && done->here[0] && !done->here[1]);
    CHECK(memcmp(kv[0][3], kv[0][1], RUN) == 0 && memcmp(kv[1][3], kv[1][1], RUN) == 0);
    kvasir_v1_done_free(done);
    kvasir_v1_done_free(NULL);

    /* A block with an error to tell, and jobs that nobody takes. */
    uint8_t elsewhere[32] = "another namespace";
    OK(kvasir_v1_plan_new(runs, 1, BLOCKS, &plan));
    OK(kvasir_v1_jobs_load(jobs, 74, plan, name_space, hashes, 6, saved, 1));
    done = next(jobs);
    CHECK(done->job == 74 && !done->ok && done->error != NULL && !done->here[0]);
    kvasir_v1_done_free(done);
    OK(kvasir_v1_jobs_load(jobs, 75, plan, elsewhere, hashes, 6, saved, 1));
    OK(kvasir_v1_jobs_close(jobs));
    INVALID(kvasir_v1_jobs_load(jobs, 76, plan, name_space, hashes, 6, saved, 1), "closed");
    done = next(jobs);
    CHECK(done->job == 75 && !done->ok);
    kvasir_v1_done_free(done);
    OK(kvasir_v1_jobs_free(jobs));
    INVALID(kvasir_v1_jobs_free(jobs), "not the handle of an open set of jobs");
    OK(kvasir_v1_plan_free(plan));
}

static void nonsense_is_refused(void) {
    uint8_t bytes[64] = {0}, answer = 0;
    uint32_t size = 0;
    kvasir_v1_key key = key_of("x");
    kvasir_v1_client *client = NULL, *gone = NULL;
    kvasir_v1_plan *plan = NULL;
    kvasir_v1_run run = {bytes, 64, 64}, overlapping = {bytes, 64, 8};
    OK(kvasir_v1_connect(endpoint, &options, &client));
    OK(kvasir_v1_connect(endpoint, &options, &gone));
    OK(kvasir_v1_close(gone));

    INVALID(kvasir_v1_close(gone), "not the handle of an open client");
    INVALID(kvasir_v1_exists(gone, &key, 1, &answer), "not the handle of an open client");
    INVALID(kvasir_v1_exists(NULL, &key, 1, &answer), "the handle of a client is null");
    INVALID(kvasir_v1_exists((kvasir_v1_client *)(void *)bytes, &key, 1, &answer), "open client");
    INVALID(kvasir_v1_plan_free((kvasir_v1_plan *)(void *)client), "not the handle of an open plan");
    INVALID(kvasir_v1_exists(client, NULL, 1, &answer), "the keys is null");
    INVALID(kvasir_v1_exists(client, &key, 1, NULL), "the answers is null");
    INVALID(kvasir_v1_exists(client, &key, SIZE_MAX / 2, &answer), "beyond the address space");
    INVALID(kvasir_v1_exists(client, (kvasir_v1_key *)(void *)((uintptr_t)&key + 1), 1, &answer), "not aligned");
    INVALID(kvasir_v1_put(client, &key, bytes, 0, NULL), "a block of 0 B");
    INVALID(kvasir_v1_put(client, NULL, bytes, 1, NULL), "the key is null");
    INVALID(kvasir_v1_get(client, &key, NULL, 1, &size), "the buffer is null");
    INVALID(kvasir_v1_get(client, &key, bytes, 64, NULL), "where the size goes is null");
    INVALID(kvasir_v1_boot(client, NULL), "is null");
    INVALID(kvasir_v1_connect(NULL, NULL, &gone), "the endpoint is null");
    INVALID(kvasir_v1_connect("nowhere", NULL, &gone), "not an endpoint");
    INVALID(kvasir_v1_connect("\xff\xfe", NULL, &gone), "not UTF-8");
    INVALID(kvasir_v1_connect(endpoint, NULL, NULL), "where the client goes is null");
    INVALID(kvasir_v1_plan_new(NULL, 1, 1, &plan), "the runs is null");
    INVALID(kvasir_v1_plan_new(&run, 0, 1, &plan), "names no memory");
    INVALID(kvasir_v1_plan_new(&overlapping, 1, 2, &plan), "overlap");
    INVALID(kvasir_v1_plan_new(&run, 1, SIZE_MAX, &plan), "beyond the memory there is");
    CHECK(kvasir_v1_connect("unix:/nowhere/at/all", NULL, &gone) == KVASIR_V1_STATUS_UNAVAILABLE);
    CHECK(strstr(kvasir_v1_error(), "no Kvasir host at unix:/nowhere/at/all") != NULL);
    OK(kvasir_v1_close(client));
}

#define FORKED(call)                                                                                   \
    do {                                                                                               \
        CHECK((call) == KVASIR_V1_STATUS_FORKED);                                                      \
        CHECK(strstr(kvasir_v1_error(), "was forked from it since") != NULL);                          \
    } while (0)

static void a_child_makes_its_own_handles(void) {
    static uint8_t kv[64];
    kvasir_v1_run run = {kv, 64, 64};
    kvasir_v1_key key = key_of("of the parent");
    kvasir_v1_client *client = NULL, *own = NULL;
    kvasir_v1_plan *plan = NULL;
    kvasir_v1_jobs *jobs = NULL;
    kvasir_v1_done *done = NULL;
    uint8_t answer = 7;
    int status = -1;
    OK(kvasir_v1_connect(endpoint, &options, &client));
    OK(kvasir_v1_plan_new(&run, 1, 1, &plan));
    OK(kvasir_v1_jobs_start(endpoint, &options, NULL, &jobs));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        FORKED(kvasir_v1_exists(client, &key, 1, &answer));
        /* Also beside handles of its own. */
        OK(kvasir_v1_connect(endpoint, &options, &own));
        OK(kvasir_v1_exists(own, &key, 1, &answer));
        FORKED(kvasir_v1_exists(client, &key, 1, &answer));
        FORKED(kvasir_v1_close(client));
        FORKED(kvasir_v1_plan_free(plan));
        FORKED(kvasir_v1_jobs_next(jobs, &done));
        FORKED(kvasir_v1_jobs_close(jobs));
        FORKED(kvasir_v1_jobs_free(jobs));
        OK(kvasir_v1_close(own));
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(kvasir_v1_exists(client, &key, 1, &answer));
    CHECK(answer == 0);
    OK(kvasir_v1_jobs_free(jobs));
    OK(kvasir_v1_plan_free(plan));
    OK(kvasir_v1_close(client));
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    CHECK(strlen(kvasir_v1_version()) > 0 && strlen(kvasir_v1_error()) == 0);
    OK(kvasir_v1_options_default(&options));
    CHECK(options.write && options.verify && options.token == NULL && options.timeout_ms == 10000);
    INVALID(kvasir_v1_options_default(NULL), "options is null");
    endpoint = argv[1];
    options.token = argv[2];
    snprintf((char *)name_space, sizeof name_space, "calls %ld", (long)getpid());
    blocks_go_in_and_out();
    jobs_save_and_load();
    nonsense_is_refused();
    a_child_makes_its_own_handles();
    puts("every call");
    return 0;
}
