/*
 * What an engine does: says once where its KV lies, saves blocks, loads them elsewhere, and hears of it by a descriptor.
 *
 *   cc -std=c11 -Iclients/c/include clients/c/examples/engine.c -lkvasir -o engine
 *   ./engine unix:/run/kvasir/data.sock          (over TCP: and a token)
 */
#include "kvasir.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, BLOCKS = 16, RUN = 16 << 10, HASH = 32 };

/* Per layer K of all blocks, then V of all blocks. */
static uint8_t kv[2 * LAYERS][BLOCKS][RUN];

static void check(kvasir_v1_status status, const char *what) {
    if (status != KVASIR_V1_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", what, kvasir_v1_error());
        exit(1);
    }
}

/* Sleeps until a job has ended. An engine has the descriptor in its own loop. */
static void wait_for(kvasir_v1_jobs *jobs, uint64_t job) {
    struct pollfd event = {.events = POLLIN};
    kvasir_v1_done *done = NULL;
    check(kvasir_v1_jobs_event_fd(jobs, &event.fd), "the descriptor");
    while (done == NULL) {
        poll(&event, 1, -1);
        check(kvasir_v1_jobs_next(jobs, &done), "the next job");
    }
    printf("job %llu: %zu blocks, %llu B%s%s\n", (unsigned long long)done->job, done->count,
           (unsigned long long)done->bytes, done->error ? ", " : "", done->error ? done->error : "");
    if (done->job != job || !done->ok) exit(1);
    kvasir_v1_done_free(done);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s ENDPOINT [TOKEN]\n", argv[0]);
        return 2;
    }
    kvasir_v1_options options;
    check(kvasir_v1_options_default(&options), "options");
    options.token = argc > 2 ? argv[2] : NULL;

    kvasir_v1_run runs[2 * LAYERS];
    for (size_t n = 0; n < 2 * LAYERS; n++) {
        runs[n] = (kvasir_v1_run){.address = kv[n][0], .len = RUN, .stride = RUN};
        for (size_t block = 0; block < BLOCKS; block++) memset(kv[n][block], (int)(n * BLOCKS + block), RUN);
    }
    kvasir_v1_plan *plan = NULL;
    kvasir_v1_jobs *jobs = NULL;
    check(kvasir_v1_plan_new(runs, 2 * LAYERS, BLOCKS, &plan), "the plan");
    check(kvasir_v1_jobs_start(argv[1], &options, NULL, &jobs), "the jobs");

    /* A real engine has a digest of model, dtype and layout, and chained hashes of tokens. */
    uint8_t name_space[32] = "my-model, bf16, tp 1/1";
    uint8_t hashes[BLOCKS / 2][HASH] = {{0}};
    uint32_t first[BLOCKS / 2], second[BLOCKS / 2];
    for (uint32_t n = 0; n < BLOCKS / 2; n++) {
        hashes[n][0] = (uint8_t)n;
        first[n] = n;
        second[n] = BLOCKS / 2 + n;
    }
    /* The first half of the blocks to the host, then from there into the second half. */
    check(kvasir_v1_jobs_save(jobs, 1, plan, name_space, hashes[0], HASH, first, BLOCKS / 2), "the save");
    wait_for(jobs, 1);
    check(kvasir_v1_jobs_load(jobs, 2, plan, name_space, hashes[0], HASH, second, BLOCKS / 2), "the load");
    wait_for(jobs, 2);
    check(kvasir_v1_jobs_free(jobs), "the jobs");
    check(kvasir_v1_plan_free(plan), "the plan");

    for (size_t n = 0; n < 2 * LAYERS; n++) {
        if (memcmp(kv[n][0], kv[n][BLOCKS / 2], BLOCKS / 2 * RUN) != 0) {
            fprintf(stderr, "run %zu differs\n", n);
            return 1;
        }
    }
    return 0;
}
