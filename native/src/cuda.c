/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caps.h"
#include "cuda_find.h"
#include "io.h"

_Static_assert((int)ARGS_GPU_MAP_MAX <= (int)CUDA_GPUS_MAX, "a map fits");

static const double load_limit = 60.0;  /* seconds for the driver's library to be loaded */
static const double probe_limit = 5.0;
/* Seconds to undo, beside as much as went forward: what was copied is copied back. */
static const double undo_beside = 100.0;
static const double end_patience = 2.0; /* seconds for a killed helper to go away */

static bool start_helper(struct cuda *cuda, enum cuda_mode mode)
{
    cuda->shared->mode = mode;
    cuda->shared->result = (struct kc_result){.reason = KC_OK};
    cuda->helper = cuda_helper_start(cuda->shared, cuda->load, &cuda->socket);
    return cuda->helper > 0;
}

static bool make_shared(struct cuda *cuda, const struct args *args, struct kc_result *result)
{
    void *memory = mmap(NULL, sizeof(*cuda->shared), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        kc_fail_errno(result, KC_INTERNAL, errno, "mmap");
        return false;
    }
    cuda->shared = memory;
    if (cuda->load == NULL)
        cuda->load = cuda_driver_load;
    cuda->helper = -1;
    cuda->socket = -1;
    cuda->undo_limit = undo_beside;
    cuda->shared->folder = cuda->folder;
    if (args == NULL)
        return true;
    cuda->deadline = io_now() + args->timeout;
    cuda->undo_limit += args->timeout + args->gpu_timeout;
    cuda->shared->deadline = cuda->deadline;
    cuda->shared->lock_timeout = args->gpu_timeout;
    cuda->shared->retry_for = args->gpu_timeout;
    cuda->shared->copy_timeout = args->timeout;
    cuda->shared->none_parked = args->command == ARGS_DUMP && !args->parked;
    cuda->shared->pair_count = args->gpu_map_count;
    memcpy(cuda->shared->pairs, args->gpu_map, args->gpu_map_count * sizeof(args->gpu_map[0]));
    cuda->shared->need_count = args->gpu_need_count;
    memcpy(cuda->shared->needs, args->gpu_needs,
           args->gpu_need_count * sizeof(args->gpu_needs[0]));
    return true;
}

/* One that hangs in the driver may not go away even so: then it is left to whoever adopts it. */
static void kill_helper(struct cuda *cuda)
{
    double deadline = io_now() + end_patience;
    io_close(&cuda->socket);
    if (cuda->helper > 0) {
        kill(cuda->helper, SIGKILL);
        while (waitpid(cuda->helper, NULL, WNOHANG) == 0 && io_now() < deadline)
            io_sleep_ms(1);
    }
    cuda->helper = -1;
}

void cuda_end(struct cuda *cuda)
{
    if (cuda->shared == NULL)
        return;
    if (cuda->socket >= 0)
        send(cuda->socket, &(char){CUDA_QUIT}, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    kill_helper(cuda);
}

static void drop(struct cuda *cuda)
{
    cuda_end(cuda);
    if (cuda->shared != NULL)
        munmap(cuda->shared, sizeof(*cuda->shared));
    cuda->shared = NULL;
}

static void report(const struct cuda_message *step, double since)
{
    static const char *const names[] = {"start", "look", "lock", "checkpoint", "restore", "unlock"};
    static struct json json;
    if ((unsigned)step->op >= sizeof(names) / sizeof(names[0]) || step->op == CUDA_OP_LOOK)
        return;
    json_begin(&json, "gpu");
    json_string(&json, "step", names[step->op]);
    json_int(&json, "pid", step->pid);
    json_real(&json, "waited_s", io_now() - since);
    json_send(&json, 0); /* a caller that does not read misses it */
}

enum { MESSAGES_AT_ONCE = 64 };

enum answer { ANSWERED, LOST, UNWANTED };

/* The helper has the driver in it, which may write anything anywhere. */
static bool is_valid(const struct cuda_message *message)
{
    return (unsigned)message->op <= CUDA_OP_UNLOCK && isfinite(message->limit) &&
           message->limit > 0.0;
}

/* Whether the transaction's deadline counts for what is asked. */
static bool goes_forward(const struct cuda *cuda, char letter)
{
    return letter == CUDA_GO &&
           (cuda->shared->mode == CUDA_DUMP || cuda->shared->mode == CUDA_UNPARK);
}

static double earlier(double one, double other)
{
    return one < other ? one : other;
}

/* Asks the helper and waits until it is done. `limit` is for what comes before its first step. */
static enum answer ask(struct cuda *cuda, char letter, double limit, bool quiet)
{
    struct cuda_message step = {.op = CUDA_OP_START};
    double since = io_now();
    /* To start the driver is done for what goes forward alone; undoing may follow any other step. */
    double start_by = goes_forward(cuda, letter) ? cuda->deadline + CUDA_GRACE
                                                 : since + limit + CUDA_START_LIMIT;
    double end_at = start_by + cuda->undo_limit; /* however many messages come */
    double hang_at = earlier(since + limit, start_by);
    double report_at = since + 1.0;
    bool asked_to_stop = false;
    if (send(cuda->socket, &letter, 1, MSG_NOSIGNAL) != 1)
        return LOST;
    for (;;) {
        struct cuda_message message;
        if (!cuda->wait(cuda->data, cuda->socket, io_until(earlier(hang_at, report_at), 1000)) &&
            !asked_to_stop) {
            asked_to_stop = true;
            if (cuda->shared->mode == CUDA_RESTORE)
                return UNWANTED; /* the processes are ended, there is nothing to undo */
            send(cuda->socket, &(char){CUDA_CANCEL}, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        ssize_t n = 1;
        /* Not all of them: the clock and the caller are looked at however fast they come. */
        for (int taken = 0; n > 0 && taken < MESSAGES_AT_ONCE; taken++) {
            n = recv(cuda->socket, &message, sizeof(message), MSG_DONTWAIT);
            if (n <= 0)
                break;
            if (n == (ssize_t)sizeof(message) && message.done)
                return ANSWERED;
            if (n != (ssize_t)sizeof(message) || !is_valid(&message))
                return LOST;
            bool same = message.op == step.op && message.pid == step.pid;
            step = message;
            hang_at = earlier(io_now() + step.limit, step.op == CUDA_OP_START ? start_by : end_at);
            if (!same)
                since = io_now();
            if (!same && !quiet)
                report(&step, since);
        }
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return LOST;
        double now = io_now();
        if (now >= earlier(hang_at, end_at))
            return LOST;
        if (now >= report_at) {
            report_at = now + 1.0;
            if (!quiet)
                report(&step, since);
        }
    }
}

static bool outcome(const struct cuda *cuda, struct kc_result *result)
{
    struct kc_result copy = cuda->shared->result;
    copy.message[sizeof(copy.message) - 1] = '\0';
    return copy.reason == KC_OK || kc_fail(result, copy.reason, "%s", copy.message);
}

static bool never_mind(void *data, int fd, int most)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    (void)data;
    poll(&ready, 1, most);
    return true;
}

/* The helper hangs in the driver or has crashed in it: another one puts right what can be. */
static bool repair(struct cuda *cuda, struct kc_result *result)
{
    struct kc_result left = {.reason = KC_OK};
    kill_helper(cuda);
    cuda->wait = never_mind;
    bool good = start_helper(cuda, CUDA_REPAIR) &&
                ask(cuda, CUDA_GO, load_limit, false) == ANSWERED && outcome(cuda, &left);
    kill_helper(cuda);
    if (good)
        return kc_fail(result, KC_GPU_FAILED,
                       "The GPU driver did not answer. What was done on the GPU is undone.");
    return kc_fail(result, KC_GPU_STUCK,
                   "The GPU driver did not answer, and what was done on the GPU could not be undone. %s",
                   left.message);
}

bool cuda_begin(struct cuda *cuda, const struct tree *tree, const struct args *args, cuda_wait wait,
                void *data, struct kc_result *result)
{
    bool used = false;
    bool told = true;
    caps_raise_all();
    for (size_t i = 0; told && !used && i < tree->count; i++)
        switch (cuda_maps_driver(tree->tasks[i].pid)) {
        case CUDA_SEEN_YES:
            used = true;
            break;
        case CUDA_SEEN_NO:
            break;
        case CUDA_SEEN_UNKNOWN:
            told = cuda_unknown(tree->tasks[i].pid, result);
            break;
        }
    caps_lower();
    cuda->shared = NULL;
    if (!told || !used)
        return told;
    cuda->wait = wait;
    cuda->data = data;
    if (!make_shared(cuda, args, result))
        return false;
    cuda->shared->root = tree->tasks[0].pid;
    return true;
}

static bool has_state(const struct cuda *cuda)
{
    for (size_t i = 0; i < cuda->shared->count && i < CUDA_TASKS_MAX; i++)
        if (cuda->shared->tasks[i].found != CUDA_NONE)
            return true;
    return false;
}

bool cuda_freeze(struct cuda *cuda, struct kc_result *result)
{
    if (cuda->shared == NULL)
        return true;
    cuda->blocked_at = io_now();
    if (!start_helper(cuda, CUDA_DUMP))
        return kc_fail_errno(result, KC_INTERNAL, errno, "The GPU helper cannot be started");
    if (ask(cuda, CUDA_GO, load_limit, false) != ANSWERED)
        return repair(cuda, result);
    bool good = outcome(cuda, result);
    if (!good || !has_state(cuda))
        drop(cuda);
    return good;
}

void cuda_thaw(struct cuda *cuda)
{
    if (cuda->shared == NULL || cuda->helper < 0)
        return;
    cuda->wait = never_mind; /* whoever cancels now still wants the GPU back */
    cuda->shared->result = (struct kc_result){.reason = KC_OK};
    if (ask(cuda, CUDA_THAW, load_limit, false) == ANSWERED)
        outcome(cuda, &cuda->problem);
    else
        repair(cuda, &cuda->problem);
    cuda->blocked_s = io_now() - cuda->blocked_at;
    if (cuda->problem.reason != KC_OK)
        kc_log("%s: %s", kc_reason_name(cuda->problem.reason), cuda->problem.message);
}

bool cuda_restore(const pid_t *pids, size_t count, const struct args *args, int images, cuda_wait wait,
                  void *data, struct kc_result *result)
{
    struct cuda cuda = {.folder = images, .wait = wait, .data = data};
    if (count == 0)
        return true;
    if (!make_shared(&cuda, args, result))
        return false;
    for (size_t i = 0; i < count && i < CUDA_TASKS_MAX; i++) {
        enum cuda_seen described = cuda_describe(pids[i], &cuda.shared->tasks[i]);
        if (described == CUDA_SEEN_UNKNOWN)
            cuda_unknown(pids[i], result);
        else if (described == CUDA_SEEN_NO)
            kc_fail(result, KC_GPU_FAILED, "Process %d, which uses the GPU, did not come back.",
                    pids[i]);
        cuda.shared->count = i + 1;
    }
    if (result->reason == KC_OK && !start_helper(&cuda, CUDA_RESTORE))
        kc_fail_errno(result, KC_INTERNAL, errno, "The GPU helper cannot be started");
    if (result->reason == KC_OK) {
        switch (ask(&cuda, CUDA_GO, load_limit, false)) {
        case ANSWERED:
            outcome(&cuda, result);
            break;
        case LOST:
            kc_fail(result, KC_GPU_FAILED, "The GPU driver did not answer.");
            break;
        case UNWANTED:
            kc_fail(result, KC_CANCELLED, "The restore was cancelled.");
            break;
        }
    }
    drop(&cuda);
    return result->reason == KC_OK;
}

void cuda_leave(struct cuda *cuda)
{
    cuda_end(cuda);
    if (cuda->shared != NULL)
        cuda->blocked_s = io_now() - cuda->blocked_at;
}

/* Whether an unpark has gone as far as to take the GPU again: what it goes on with is to run then. */
static bool has_begun(const struct cuda *cuda)
{
    for (size_t i = 0; i < cuda->shared->count && i < CUDA_TASKS_MAX; i++)
        if (cuda->shared->tasks[i].parked && cuda->shared->tasks[i].found == CUDA_RUNNING)
            return true;
    return false;
}

bool cuda_unpark(struct cuda *cuda, struct kc_result *result)
{
    if (cuda->shared == NULL)
        return true;
    if (!start_helper(cuda, CUDA_UNPARK))
        return kc_fail_errno(result, KC_INTERNAL, errno, "The GPU helper cannot be started");
    cuda->wait = never_mind; /* half of it is of no use to anybody */
    if (ask(cuda, CUDA_GO, load_limit, false) == ANSWERED) {
        outcome(cuda, result);
    } else {
        repair(cuda, result);
        /* That went on with what was begun, or could not. Before that there is nothing to go on with. */
        if (result->reason == KC_GPU_FAILED && has_begun(cuda))
            *result = (struct kc_result){.reason = KC_OK};
    }
    if (!has_state(cuda))
        drop(cuda);
    else
        cuda_end(cuda);
    return result->reason == KC_OK;
}

bool cuda_probe(struct json *json, struct kc_result *result)
{
    struct cuda cuda = {.wait = never_mind};
    bool there = make_shared(&cuda, NULL, result) && start_helper(&cuda, CUDA_PROBE) &&
                 ask(&cuda, CUDA_GO, probe_limit, true) == ANSWERED;
    if (there && cuda.shared->loaded != CUDA_NO_LIBRARY) {
        const struct cuda_shared *shared = cuda.shared;
        json_open(json, "gpu", '{');
        json_text(json, "driver", shared->driver_version, sizeof(shared->driver_version));
        json_int(json, "cuda_version", shared->version);
        json_bool(json, "checkpoint", shared->loaded == CUDA_LOADED);
        json_bool(json, "gpu_map",
                  shared->loaded == CUDA_LOADED && shared->version >= CUDA_PAIRS_SINCE);
        json_bool(json, "custom_storage", shared->custom_storage);
        json_close(json);
        outcome(&cuda, result);
    } else {
        json_null(json, "gpu");
        if (!there)
            kc_fail(result, KC_GPU_FAILED, "The NVIDIA driver's library does not answer.");
    }
    drop(&cuda);
    return result->reason == KC_OK;
}
