/*
 * Kvasir's client for C and everything that calls C. Made from clients/c/src by cbindgen; do not edit.
 *
 * Link with -lkvasir. Every function that can fail returns a kvasir_v1_status; kvasir_v1_error() then says what failed, on
 * what, and what to do. Handles may be used by any thread, and closed while others use them: what is under way ends
 * first. A handle that is null, closed or of another kind is refused. All texts are UTF-8 and end with a zero.
 *
 * A child of fork() makes handles of its own: those of its parent are refused, with KVASIR_V1_STATUS_FORKED. Fork while no
 * other thread is in a call.
 *
 * What begins with kvasir_v1_ keeps its meaning for as long as the library is libkvasir.so.1.
 */

#ifndef KVASIR_H
#define KVASIR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/*
 How a call ended.
 */
enum kvasir_v1_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /*
   It did what it says.
   */
  KVASIR_V1_STATUS_OK = 0,
  /*
   An argument makes no sense; nothing was done.
   */
  KVASIR_V1_STATUS_INVALID = 1,
  /*
   The host cannot be asked now, or not by this client any more. The same may succeed later, on a new client if this one
   is closed to it.
   */
  KVASIR_V1_STATUS_UNAVAILABLE = 2,
  /*
   The host, or the protocol, does not allow it. The same call fails again.
   */
  KVASIR_V1_STATUS_REFUSED = 3,
  /*
   The buffer is too small for the block.
   */
  KVASIR_V1_STATUS_BUFFER = 4,
  /*
   A fault of this library. The handle may be closed, and should not be used for anything else.
   */
  KVASIR_V1_STATUS_FAULT = 5,
  /*
   The handle was made before this process was forked: it is the parent's. Nothing was done; make another one here.
   */
  KVASIR_V1_STATUS_FORKED = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvasir_v1_status kvasir_v1_status;
#else
typedef int32_t kvasir_v1_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/*
 What became of a block that was put.
 */
enum kvasir_v1_put_outcome
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /*
   It was stored.
   */
  KVASIR_V1_PUT_OUTCOME_STORED = 0,
  /*
   It was there.
   */
  KVASIR_V1_PUT_OUTCOME_ALREADY_STORED = 1,
  /*
   Another writer is storing it.
   */
  KVASIR_V1_PUT_OUTCOME_IN_PROGRESS = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvasir_v1_put_outcome kvasir_v1_put_outcome;
#else
typedef int32_t kvasir_v1_put_outcome;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/*
 A connection to a host. Calls take turns; use one client per thread for more.
 */
typedef struct kvasir_v1_client kvasir_v1_client;

/*
 Threads that load and save.
 */
typedef struct kvasir_v1_jobs kvasir_v1_jobs;

/*
 Where blocks lie.
 */
typedef struct kvasir_v1_plan kvasir_v1_plan;

/*
 How to connect. Begin with `kvasir_v1_options_default`.
 */
typedef struct kvasir_v1_options {
  /*
   The token that tells the host who this client is, over TCP; null for none.
   */
  const char *token;
  /*
   How long the host may take to answer, in milliseconds.
   */
  uint32_t timeout_ms;
  /*
   The tenant on whose account blocks are stored; 0 = none in particular.
   */
  uint16_t tenant;
  /*
   Ask to store and remove blocks.
   */
  bool write;
  /*
   Compare every block read with its checksum; one that differs is reported to the host and is a miss.
   */
  bool verify;
} kvasir_v1_options;

/*
 How jobs are run. Begin with `kvasir_v1_job_options_default`.
 */
typedef struct kvasir_v1_job_options {
  /*
   Threads for loads, each with a connection; at least 1.
   */
  uint32_t load_threads;
  /*
   Threads for saves, each with a connection; at least 1.
   */
  uint32_t save_threads;
  /*
   How long a load may take from when it is given, in milliseconds.
   */
  uint32_t load_ms;
  /*
   How long a save may take, likewise.
   */
  uint32_t save_ms;
  /*
   The most jobs that are given and not taken by `kvasir_v1_jobs_next`; further ones are refused.
   */
  uint32_t jobs_max;
  /*
   Workload class of the loads, 0 = unknown.
   */
  uint16_t workload_class;
} kvasir_v1_job_options;

/*
 Names one block.
 */
typedef struct kvasir_v1_key {
  uint64_t low;
  uint64_t high;
} kvasir_v1_key;

/*
 A part of every block: of block n, the `len` bytes at `address` + n * `stride`.
 */
typedef struct kvasir_v1_run {
  uint8_t *address;
  size_t len;
  size_t stride;
} kvasir_v1_run;

/*
 What became of a job. Free it with `kvasir_v1_done_free`.
 */
typedef struct kvasir_v1_done {
  /*
   As the engine called it.
   */
  uint64_t job;
  /*
   Bytes that were copied.
   */
  uint64_t bytes;
  /*
   `count` answers, 1 or 0, of each block: a load has brought all of it, and it is what was stored; a save knows it to be
   stored, or being stored by another writer.
   */
  const uint8_t *here;
  size_t count;
  /*
   The first failure, if it was not just that a block is not there; null otherwise.
   */
  const char *error;
  /*
   It is true of all blocks.
   */
  bool ok;
} kvasir_v1_done;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 What the last call of this thread that failed has to say. Never null; empty if none has failed. It is valid until the next
 call of this thread that fails.
 */
const char *kvasir_v1_error(void);

/*
 The options that are used where null is given for them.

 # Safety
 `options` is null or room for one.
 */
kvasir_v1_status kvasir_v1_options_default(struct kvasir_v1_options *options);

/*
 The options of jobs that are used where null is given for them.

 # Safety
 `options` is null or room for one.
 */
kvasir_v1_status kvasir_v1_job_options_default(struct kvasir_v1_job_options *options);

/*
 The version of this library, such as "0.1.0".
 */
const char *kvasir_v1_version(void);

/*
 Connects to the host at `endpoint`, "unix:/path" or "host:port", and writes the new client to `client`. `options` may be
 null.

 # Safety
 Each pointer is null or what its type says; texts end with a zero.
 */
kvasir_v1_status kvasir_v1_connect(const char *endpoint,
                                   const struct kvasir_v1_options *options,
                                   struct kvasir_v1_client **client);

/*
 Ends a connection. What the host holds for it ends too.
 */
kvasir_v1_status kvasir_v1_close(struct kvasir_v1_client *client);

/*
 Writes a random number of the host's run to `boot`. With another one, what a caller remembers of the host's blocks is
 void.

 # Safety
 `boot` is null or room for one.
 */
kvasir_v1_status kvasir_v1_boot(const struct kvasir_v1_client *client,
                                uint64_t *boot);

/*
 Writes the key of the block that an engine names by `hash_len` bytes of hash to `key`. `name_space` has 32 bytes, a digest of
 what the hash does not cover: model, dtype, layout, who holds which part of it.

 # Safety
 Each pointer is null or what its type and length say.
 */
kvasir_v1_status kvasir_v1_key_of(const uint8_t *name_space,
                                  const uint8_t *hash,
                                  size_t hash_len,
                                  struct kvasir_v1_key *key);

/*
 Writes 1 to `found` for each block that is there, and 0 for each other.

 # Safety
 Each pointer is null or what its type and `count` say.
 */
kvasir_v1_status kvasir_v1_exists(const struct kvasir_v1_client *client,
                                  const struct kvasir_v1_key *keys,
                                  size_t count,
                                  uint8_t *found);

/*
 Removes blocks. Writes 1 to `removed` for each that was there.

 # Safety
 Each pointer is null or what its type and `count` say.
 */
kvasir_v1_status kvasir_v1_remove(const struct kvasir_v1_client *client,
                                  const struct kvasir_v1_key *keys,
                                  size_t count,
                                  uint8_t *removed);

/*
 Keeps blocks from being evicted until `kvasir_v1_release` was called for them as often, for `ms` at most, and no longer than
 this client is open. Writes 1 to `held` for each that is there. The host refuses where its limit is reached; then some of
 the blocks may be held.

 # Safety
 Each pointer is null or what its type and `count` say.
 */
kvasir_v1_status kvasir_v1_hold(const struct kvasir_v1_client *client,
                                const struct kvasir_v1_key *keys,
                                size_t count,
                                uint32_t ms,
                                uint8_t *held);

/*
 Takes back one `kvasir_v1_hold` of each block. Writes 1 to `released` for each that was held: it may have ended by its time.

 # Safety
 Each pointer is null or what its type and `count` say.
 */
kvasir_v1_status kvasir_v1_release(const struct kvasir_v1_client *client,
                                   const struct kvasir_v1_key *keys,
                                   size_t count,
                                   uint8_t *released);

/*
 Stores `len` bytes under `key`. `outcome` may be null.

 # Safety
 Each pointer is null or what its type and length say.
 */
kvasir_v1_status kvasir_v1_put(const struct kvasir_v1_client *client,
                               const struct kvasir_v1_key *key,
                               const uint8_t *bytes,
                               size_t len,
                               kvasir_v1_put_outcome *outcome);

/*
 Copies the block of `key` to the front of `buffer`, which has `len` bytes, and writes its size to `size`: 0 if there is no
 such block. With `KVASIR_V1_STATUS_BUFFER` it does not fit, and `size` says how large it is. After any other error the buffer
 is undefined.

 # Safety
 Each pointer is null or what its type and length say.
 */
kvasir_v1_status kvasir_v1_get(const struct kvasir_v1_client *client,
                               const struct kvasir_v1_key *key,
                               uint8_t *buffer,
                               size_t len,
                               uint32_t *size);

/*
 Says once where `blocks` blocks lie, in how many runs, and writes the new plan to `plan`. A block is the bytes of its runs,
 one behind the other.

 The memory stays until the plan is freed and its jobs have ended; while a job names a block, nobody else writes to it, and
 nobody reads one that is loaded.

 # Safety
 As above; each pointer is null or what its type and count say.
 */
kvasir_v1_status kvasir_v1_plan_new(const struct kvasir_v1_run *runs,
                                    size_t count,
                                    size_t blocks,
                                    struct kvasir_v1_plan **plan);

/*
 Frees a plan. Jobs that name it go on.
 */
kvasir_v1_status kvasir_v1_plan_free(struct kvasir_v1_plan *plan);

/*
 Starts the threads of jobs at `endpoint`, and writes their handle to `jobs`. They connect when the first job comes, so the
 host need not run yet. Both options may be null.

 # Safety
 Each pointer is null or what its type says; texts end with a zero.
 */
kvasir_v1_status kvasir_v1_jobs_start(const char *endpoint,
                                      const struct kvasir_v1_options *options,
                                      const struct kvasir_v1_job_options *job_options,
                                      struct kvasir_v1_jobs **jobs);

/*
 Gives a load: block n of the plan for each n of `blocks`, from the block that the engine names by the hash at the same place.
 The hashes follow each other, `hash_len` bytes each; `name_space` has 32 bytes. What is loaded is compared with its
 label: another block under the same key is a failure, never a hit.

 A job that was taken is reported once by `kvasir_v1_jobs_next`, after copying has stopped. `job` is for the caller to choose.

 # Safety
 Each pointer is null or what its type and count say.
 */
kvasir_v1_status kvasir_v1_jobs_load(const struct kvasir_v1_jobs *jobs,
                                     uint64_t job,
                                     const struct kvasir_v1_plan *plan,
                                     const uint8_t *name_space,
                                     const uint8_t *hashes,
                                     size_t hash_len,
                                     const uint32_t *blocks,
                                     size_t count);

/*
 Gives a save, with the same arguments: each block is stored with a label of its own, which makes it larger than in the plan.

 # Safety
 Each pointer is null or what its type and count say.
 */
kvasir_v1_status kvasir_v1_jobs_save(const struct kvasir_v1_jobs *jobs,
                                     uint64_t job,
                                     const struct kvasir_v1_plan *plan,
                                     const uint8_t *name_space,
                                     const uint8_t *hashes,
                                     size_t hash_len,
                                     const uint32_t *blocks,
                                     size_t count);

/*
 Writes a descriptor to `fd` that is readable when jobs have ended. Only wait for it, and then call `kvasir_v1_jobs_next` until
 it has nothing more. It is closed by `kvasir_v1_jobs_free`.

 # Safety
 `fd` is null or room for one.
 */
kvasir_v1_status kvasir_v1_jobs_event_fd(const struct kvasir_v1_jobs *jobs,
                                         int *fd);

/*
 Writes the next job that has ended to `done`, or null if there is none. Never waits.

 # Safety
 `done` is null or room for one.
 */
kvasir_v1_status kvasir_v1_jobs_next(const struct kvasir_v1_jobs *jobs,
                                     struct kvasir_v1_done **done);

/*
 Frees what `kvasir_v1_jobs_next` gave. Null is fine.

 # Safety
 `done` is null, or came from `kvasir_v1_jobs_next` and was not freed.
 */
void kvasir_v1_done_free(struct kvasir_v1_done *done);

/*
 Takes no more jobs, waits until copying has stopped, and reports all that are left as failed. They can still be had by
 `kvasir_v1_jobs_next`.
 */
kvasir_v1_status kvasir_v1_jobs_close(const struct kvasir_v1_jobs *jobs);

/*
 Closes jobs if they are not, and frees them with all that nobody took.
 */
kvasir_v1_status kvasir_v1_jobs_free(struct kvasir_v1_jobs *jobs);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVASIR_H */
