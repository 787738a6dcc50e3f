/* SPDX-License-Identifier: BSD-3-Clause */
/* The GPU's part of a transaction over several processes, whatever the driver does. */
#include "check.h"
#include "cuda_tree.h"
#include "fake_driver.h"
#include "io.h"

static struct cuda_driver driver;
static struct cuda_task tasks[PROCESSES];
static size_t count;
static struct kc_result result;
static int steps_until_cancel; /* -1: never */

static pid_t ended; /* this process has ended; 0: none */
static enum cuda_op last_step; /* before this one process 1 ends */
static enum cuda_op begins_at; /* before this one process 2 begins with CUDA */
static size_t comes; /* in that many looks for more it comes into being; 0: never */
static bool cannot_tell;

static bool is_alive(const struct cuda_task *task)
{
    return task->pid != ended;
}

static bool step(void *data, enum cuda_op op, pid_t pid, double limit)
{
    (void)data;
    CHECK(limit > 0.0 && (op == CUDA_OP_START || fake_find(pid) < PROCESSES));
    if (op == last_step && pid == FIRST + 1)
        ended = pid;
    if (op == begins_at && op != CUDA_OP_START && fake->state[2] == CUDA_NONE)
        fake->state[2] = CUDA_RUNNING;
    if (steps_until_cancel > 0)
        steps_until_cancel--;
    return steps_until_cancel != 0;
}

static bool more(void *data, struct kc_result *said)
{
    (void)data;
    if (comes == 1)
        count = PROCESSES;
    comes -= comes > 0;
    return !cannot_tell || comes > 0 || kc_fail(said, KC_GPU_FAILED, "It cannot be told.");
}

static struct cuda_work reset(void)
{
    fake_reset();
    fake_load(&driver);
    count = PROCESSES;
    steps_until_cancel = -1;
    ended = 0;
    last_step = CUDA_OP_START;
    begins_at = CUDA_OP_START;
    comes = 0;
    cannot_tell = false;
    result = (struct kc_result){.reason = KC_OK};
    for (int i = 0; i < PROCESSES; i++)
        tasks[i] = (struct cuda_task){.pid = FIRST + i, .found = CUDA_NONE, .memory = -1};
    return (struct cuda_work){.driver = &driver,
                              .tasks = tasks,
                              .count = &count,
                              .lock_timeout = 0.05,
                              .copy_timeout = 0.2,
                              .step = step};
}

static bool freeze(struct cuda_work *work)
{
    double lock_s;
    double copy_s;
    return cuda_tree_look(work, false, &result) &&
           cuda_tree_freeze(work, &lock_s, &copy_s, &result);
}

static bool unpark(struct cuda_work *work)
{
    return cuda_tree_look(work, false, &result) && cuda_tree_unpark(work, &result);
}

static bool all_are(int state)
{
    for (int i = 0; i < PROCESSES; i++)
        if (fake->state[i] != state)
            return false;
    return true;
}

static void test_order(void)
{
    struct cuda_work work = reset();
    CHECK(freeze(&work) && cuda_tree_any(&work) && all_are(CUDA_CHECKPOINTED));
    CHECK(cuda_tree_return(&work, &result) && all_are(CUDA_RUNNING));
    CHECK_STRING(fake->calls, "L0 L1 L2 C0 C1 C2 R0 R1 R2 U2 U1 U0 ");
}

static void test_undo(void)
{
    static const struct {
        char letter;
        size_t at;
        int error;
        enum kc_reason reason;
        const char *calls;
    } cases[] = {
        {'L', 0, 999, KC_GPU_FAILED, "L0 "},
        {'L', 2, 999, KC_GPU_FAILED, "L0 L1 L2 U1 U0 "},
        {'L', 1, CUDA_ERROR_NOT_SUPPORTED, KC_GPU_UNSUPPORTED, "L0 L1 U0 "},
        {'L', 1, CUDA_ERROR_NOT_READY, KC_GPU_BUSY, "L0 L1 U0 "},
        {'C', 0, 999, KC_GPU_FAILED, "L0 L1 L2 C0 U2 U1 U0 "},
        {'C', 2, CUDA_ERROR_OUT_OF_MEMORY, KC_GPU_FAILED,
         "L0 L1 L2 C0 C1 C2 R0 R1 U2 U1 U0 "},
        {'S', 1, CUDA_ERROR_OPERATING_SYSTEM, KC_OK, ""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct cuda_work work = reset();
        fake_fail(cases[i].letter, cases[i].at, -1, cases[i].error);
        if (cases[i].reason == KC_OK) {
            CHECK(freeze(&work)); /* a process that the driver does not know is left alone */
            CHECK(cuda_tree_return(&work, &result) && all_are(CUDA_RUNNING));
            CHECK_STRING(fake->calls, "L0 L2 C0 C2 R0 R2 U2 U0 ");
            continue;
        }
        CHECK(!freeze(&work));
        CHECK(result.reason == cases[i].reason && result.message[0] != '\0');
        CHECK(all_are(CUDA_RUNNING));
        CHECK_STRING(fake->calls, cases[i].calls);
    }
    struct cuda_work work = reset();
    fake_fail('L', 0, -1, CUDA_ERROR_NOT_READY);
    CHECK(!freeze(&work) && strstr(result.message, "CUDA_ERROR_NOT_READY (device not ready)"));
    work = reset();
    fake_fail('C', 1, -1, 12345);
    CHECK(!freeze(&work) && strstr(result.message, "CUDA error 12345"));
}

static void test_undo_fails(void)
{
    struct cuda_work work = reset();
    fake_fail('C', 1, 1, 999);
    CHECK(!freeze(&work) && result.reason == KC_GPU_FAILED && all_are(CUDA_RUNNING));
    work = reset();
    CHECK(freeze(&work));
    fake_fail('R', 1, -1, CUDA_ERROR_OUT_OF_MEMORY);
    work.retry_for = 0.15;
    CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_FULL);
    CHECK(fake->state[0] == CUDA_RUNNING && fake->state[1] == CUDA_CHECKPOINTED &&
          fake->state[2] == CUDA_RUNNING);
    /* Room came in time. */
    work = reset();
    CHECK(freeze(&work));
    fake_fail('R', 1, 2, CUDA_ERROR_OUT_OF_MEMORY);
    work.retry_for = 5.0;
    CHECK(cuda_tree_return(&work, &result) && all_are(CUDA_RUNNING));
    /* A driver that cannot do it any more once it has failed so. */
    work = reset();
    CHECK(freeze(&work));
    fake_fail('R', 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
    fake->then = CUDA_ERROR_OPERATING_SYSTEM;
    work.retry_for = 5.0;
    CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_FULL);
    work = reset();
    fake_fail('U', 0, -1, 999);
    work.lock_timeout = 0.01;
    CHECK(freeze(&work));
    CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_STUCK);
    CHECK(fake->state[0] == CUDA_LOCKED && fake->state[1] == CUDA_RUNNING);
}

static int restore_but_one(int pid, struct cuda_restore_args *args)
{
    struct cuda_driver other;
    fake_load(&other);
    return pid == FIRST + 1 ? CUDA_ERROR_OUT_OF_MEMORY : other.restore(pid, args);
}

/* The driver tells the state of that process so many times, and then not any more. */
static void fake_tells(int at, int times)
{
    fake_fail('S', (size_t)at, times, CUDA_SUCCESS);
    fake->then = CUDA_ERROR_NOT_INITIALIZED;
}

static void test_undo_is_not_answered(void)
{
    for (int at = 0; at < PROCESSES; at++)
        for (int times = 0; times < 2; times++) {
            struct cuda_work work = reset();
            CHECK(freeze(&work));
            fake_tells(at, times);
            CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_STUCK);
            CHECK(strstr(result.message, "cannot be reached"));
            for (int i = 0; i < PROCESSES; i++)
                CHECK(fake->state[i] == (i != at      ? CUDA_RUNNING
                                         : times == 0 ? CUDA_CHECKPOINTED
                                                      : CUDA_LOCKED));
            work = reset(); /* one that has ended has nothing to be undone */
            CHECK(freeze(&work));
            fake_tells(at, times);
            work.alive = is_alive;
            ended = FIRST + at;
            CHECK(cuda_tree_return(&work, &result) && result.reason == KC_OK);
        }
    struct cuda_work work = reset();
    driver.restore = restore_but_one;
    fake->state[0] = fake->state[1] = fake->state[2] = CUDA_CHECKPOINTED;
    fake_tells(0, 3); /* two looks before, and one before it is restored */
    CHECK(!unpark(&work) && result.reason == KC_GPU_STUCK && fake->state[0] == CUDA_LOCKED);
}

/* Its number may be another process's by then. */
static void test_who_has_ended_is_left_alone(void)
{
    static const struct {
        enum cuda_op before;
        const char *calls;
    } cases[] = {{CUDA_OP_LOCK, "L0 L2 C0 C2 R0 R2 U2 U0 "},
                 {CUDA_OP_CHECKPOINT, "L0 L1 L2 C0 C2 R0 R2 U2 U0 "},
                 {CUDA_OP_RESTORE, "L0 L1 L2 C0 C1 C2 R0 R2 U2 U0 "},
                 {CUDA_OP_UNLOCK, "L0 L1 L2 C0 C1 C2 R0 R1 R2 U2 U0 "}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct cuda_work work = reset();
        work.alive = is_alive;
        last_step = cases[i].before;
        CHECK(freeze(&work) && cuda_tree_return(&work, &result));
        CHECK_STRING(fake->calls, cases[i].calls);
    }
}

static void test_states_that_were_there_before(void)
{
    struct cuda_work work = reset();
    fake->state[0] = CUDA_CHECKPOINTED;
    fake->state[1] = CUDA_LOCKED;
    fake->state[2] = CUDA_NONE;
    CHECK(freeze(&work));
    CHECK(fake->state[1] == CUDA_CHECKPOINTED);
    CHECK(cuda_tree_return(&work, &result));
    CHECK_STRING(fake->calls, "C1 R1 ");
    CHECK(fake->state[0] == CUDA_CHECKPOINTED && fake->state[1] == CUDA_LOCKED);
    static const struct {
        int state;
        enum kc_reason reason;
    } bad[] = {{CUDA_FAILED, KC_GPU_FAILED},
               {CUDA_CHECKPOINTING, KC_GPU_BUSY},
               {CUDA_RESTORING, KC_GPU_BUSY}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        work = reset();
        fake->state[1] = bad[i].state;
        CHECK(!freeze(&work) && result.reason == bad[i].reason);
        CHECK_STRING(fake->calls, "");
    }
    work = reset();
    work.none_parked = true; /* what is so has lost its memory */
    fake->state[1] = CUDA_CHECKPOINTED;
    CHECK(!freeze(&work) && result.reason == KC_GPU_FAILED && strstr(result.message, "may be lost"));
    CHECK_STRING(fake->calls, "");
    work = reset();
    fake->state[2] = CUDA_NONE;
    tasks[2].holds_device = true; /* CRIU could not save it */
    CHECK(!freeze(&work) && result.reason == KC_GPU_UNSUPPORTED);
    CHECK(strstr(result.message, "forked") && fake->calls[0] == '\0');
    work = reset();
    fake->state[2] = CUDA_NONE;
    tasks[2].has_thread = true; /* it has CUDA state that cannot be reached */
    CHECK(!freeze(&work) && result.reason == KC_GPU_FAILED && fake->calls[0] == '\0');
    work = reset();
    for (int i = 0; i < PROCESSES; i++)
        fake->state[i] = CUDA_NONE;
    fake->init = 999; /* nobody needs the driver to start */
    CHECK(cuda_tree_look(&work, false, &result) && !cuda_tree_any(&work));
    work = reset();
    fake->init = 100;
    CHECK(!freeze(&work) && result.reason == KC_GPU_UNSUPPORTED);
}

static void test_restored(void)
{
    struct cuda_work work = reset();
    for (int i = 0; i < PROCESSES; i++)
        fake->state[i] = CUDA_CHECKPOINTED;
    CHECK(cuda_tree_look(&work, true, &result) && cuda_tree_return(&work, &result));
    CHECK_STRING(fake->calls, "R0 R1 R2 U2 U1 U0 ");
    work = reset();
    fake->state[0] = CUDA_CHECKPOINTED;
    CHECK(!cuda_tree_look(&work, true, &result) && result.reason == KC_GPU_FAILED);
}

static int looks; /* how often there was no room yet */

static bool room(void *data)
{
    (void)data;
    return --looks < 0;
}

static void test_room(void)
{
    struct cuda_work work = reset();
    work.room = room;
    work.retry_for = 30.0;
    looks = 2;
    CHECK(freeze(&work) && cuda_tree_return(&work, &result) && looks == -1 && all_are(CUDA_RUNNING));
    work = reset();
    work.room = room;
    work.retry_for = 0.05;
    looks = 1000; /* never: it is tried even so */
    CHECK(freeze(&work) && cuda_tree_return(&work, &result) && all_are(CUDA_RUNNING));
}

static void test_unpark(void)
{
    struct cuda_work work = reset();
    fake->state[0] = fake->state[1] = CUDA_CHECKPOINTED;
    CHECK(unpark(&work) && all_are(CUDA_RUNNING) && tasks[0].parked && !tasks[2].parked);
    CHECK_STRING(fake->calls, "R0 R1 U1 U0 ");
    work = reset();
    CHECK(unpark(&work));
    CHECK_STRING(fake->calls, "");
    /* One that was left locked is let go too. */
    work = reset();
    fake->state[1] = CUDA_LOCKED;
    CHECK(unpark(&work) && all_are(CUDA_RUNNING));
    CHECK_STRING(fake->calls, "U1 ");
    work = reset();
    fake->state[0] = fake->state[1] = fake->state[2] = CUDA_CHECKPOINTED;
    fake_fail('R', 1, -1, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(!unpark(&work) && result.reason == KC_GPU_FULL && all_are(CUDA_CHECKPOINTED));
    CHECK_STRING(fake->calls, "R0 R1 R2 C0 C2 ");
    fake_fail('R', 1, 0, 0);
    result = (struct kc_result){.reason = KC_OK};
    CHECK(unpark(&work) && all_are(CUDA_RUNNING));
    /* Without room nothing is tried. */
    work = reset();
    fake->state[1] = CUDA_CHECKPOINTED;
    work.room = room;
    looks = 1000;
    CHECK(!unpark(&work) && result.reason == KC_GPU_FULL);
    CHECK_STRING(fake->calls, "");
}

/* Processes that begin with CUDA, or come into being, while others are halted or copied. */
static void test_newcomers(void)
{
    static const struct {
        enum cuda_op begins;
        size_t comes;
        const char *calls;
    } cases[] = {{CUDA_OP_LOCK, 0, "L0 L1 L2 C0 C1 C2 "},
                 {CUDA_OP_CHECKPOINT, 0, "L0 L1 C0 C1 L2 C2 "},
                 {CUDA_OP_START, 1, "L0 L1 L2 C0 C1 C2 "},
                 {CUDA_OP_START, 2, "L0 L1 C0 C1 L2 C2 "}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct cuda_work work = reset();
        work.more = more;
        comes = cases[i].comes;
        begins_at = cases[i].begins;
        if (comes > 0)
            count = PROCESSES - 1;
        else
            fake->state[2] = CUDA_NONE;
        CHECK(freeze(&work) && all_are(CUDA_CHECKPOINTED));
        CHECK_STRING(fake->calls, cases[i].calls);
        CHECK(cuda_tree_return(&work, &result) && all_are(CUDA_RUNNING));
    }
    for (size_t at = 0; at < 2; at++) { /* one that cannot be seen: all is undone */
        struct cuda_work work = reset();
        work.more = more;
        comes = at + 1;
        cannot_tell = true;
        CHECK(!freeze(&work) && result.reason == KC_GPU_FAILED && all_are(CUDA_RUNNING));
        CHECK((strstr(fake->calls, "C2") != NULL) == (at == 1));
    }
}

/* One deadline for all processes together, and what was done is undone without it. */
static void test_deadline(void)
{
    struct cuda_work work = reset();
    fake->slow_ms = 150;
    work.deadline = io_now() + 0.2;
    CHECK(!freeze(&work) && result.reason == KC_TIMEOUT && all_are(CUDA_RUNNING));
    CHECK(strstr(fake->calls, "C2") == NULL);
    work = reset();
    work.deadline = io_now() - 1.0;
    CHECK(!freeze(&work) && result.reason == KC_TIMEOUT);
    CHECK_STRING(fake->calls, "");
    work = reset();
    work.lock_timeout = 60.0;
    work.deadline = io_now() + 0.2;
    fake_fail('L', 1, -1, CUDA_ERROR_NOT_READY);
    CHECK(!freeze(&work) && result.reason == KC_TIMEOUT && all_are(CUDA_RUNNING));
    work = reset(); /* all or nothing */
    fake->slow_ms = 150;
    fake->state[0] = fake->state[1] = fake->state[2] = CUDA_CHECKPOINTED;
    work.deadline = io_now() + 0.2;
    CHECK(!unpark(&work) && result.reason == KC_TIMEOUT && all_are(CUDA_CHECKPOINTED));
    CHECK(strstr(fake->calls, "R2") == NULL);
}

static int attempts;

static int restore_never(int pid, struct cuda_restore_args *args)
{
    (void)pid;
    (void)args;
    attempts++;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Room is waited for once, and not by each process anew. */
static void test_patience(void)
{
    struct cuda_work work = reset();
    CHECK(freeze(&work));
    driver.restore = restore_never;
    work.retry_for = 0.35; /* 4 attempts in vain */
    attempts = 0;
    CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_FULL);
    CHECK(attempts >= PROCESSES && attempts <= PROCESSES + 4);
}

static void test_cancel_anywhere(void)
{
    for (int steps = 1;; steps++) {
        struct cuda_work work = reset();
        steps_until_cancel = steps;
        bool done = freeze(&work);
        CHECK(done || (result.reason == KC_CANCELLED && all_are(CUDA_RUNNING)));
        if (done) {
            CHECK(steps > 2 * PROCESSES);
            return;
        }
    }
}

int main(void)
{
    fake_make();
    test_order();
    test_undo();
    test_undo_fails();
    test_undo_is_not_answered();
    test_who_has_ended_is_left_alone();
    test_states_that_were_there_before();
    test_restored();
    test_room();
    test_unpark();
    test_newcomers();
    test_deadline();
    test_patience();
    test_cancel_anywhere();
    return 0;
}
