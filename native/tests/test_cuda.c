/* SPDX-License-Identifier: BSD-3-Clause */
/* The GPU's part of a transaction against a driver of this test's own, in which anything may fail. */
#include "check.h"
#include "cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caps.h"
#include "io.h"
#include "procfs.h"

enum { PROCESSES = 3, FIRST = 100, CALLS = 512, HANG = -1, CRASH = -2 };

/* The driver, in memory that the helper has too. */
static struct {
    int pid[PROCESSES];
    int state[PROCESSES];
    char calls[CALLS]; /* what was called, one letter each, and of which process */
    size_t count;
    char fail; /* this letter fails... */
    size_t at; /* ...for this process... */
    int times; /* ...so many times, -1: always... */
    int with;  /* ...with this error */
    int init;
} *fake;

static size_t find(int pid)
{
    for (size_t i = 0; i < PROCESSES; i++)
        if (fake->pid[i] == pid)
            return i;
    return PROCESSES;
}

static int call(char letter, int pid)
{
    size_t at = find(pid);
    if (at == PROCESSES)
        return CUDA_ERROR_INVALID_VALUE;
    if (letter != 'S') {
        CHECK(fake->count + 3 < CALLS);
        fake->calls[fake->count++] = letter;
        fake->calls[fake->count++] = (char)('0' + at);
        fake->calls[fake->count++] = ' ';
        fake->calls[fake->count] = '\0';
    }
    if (letter != fake->fail || at != fake->at || fake->times == 0)
        return CUDA_SUCCESS;
    if (fake->times > 0)
        fake->times--;
    if (fake->with == HANG)
        for (;;)
            pause();
    if (fake->with == CRASH)
        _exit(1);
    return fake->with;
}

static int move(char letter, int pid, int from, int to)
{
    int error = call(letter, pid);
    if (error != CUDA_SUCCESS)
        return error;
    if (fake->state[find(pid)] != from)
        return CUDA_ERROR_ILLEGAL_STATE;
    fake->state[find(pid)] = to;
    return CUDA_SUCCESS;
}

static int fake_init(unsigned flags)
{
    return flags == 0 ? fake->init : CUDA_ERROR_INVALID_VALUE;
}

static int fake_name(int error, const char **text)
{
    *text = error == CUDA_ERROR_NOT_READY ? "CUDA_ERROR_NOT_READY" : NULL;
    return *text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int fake_words(int error, const char **text)
{
    *text = "device not ready";
    return error == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int fake_count(int *count)
{
    *count = 1;
    return CUDA_SUCCESS;
}

static int fake_get(int *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

static int fake_uuid(struct cuda_uuid *uuid, int device)
{
    memset(uuid, device + 1, sizeof(*uuid));
    return CUDA_SUCCESS;
}

static int fake_gpu_name(char *name, int length, int device)
{
    snprintf(name, (size_t)length, "GPU %d", device);
    return CUDA_SUCCESS;
}

static int fake_memory(size_t *bytes, int device)
{
    *bytes = (size_t)(device + 1) << 30;
    return CUDA_SUCCESS;
}

static int fake_state(int pid, int *state)
{
    int error = call('S', pid);
    if (error != CUDA_SUCCESS)
        return error;
    *state = fake->state[find(pid)];
    return *state == CUDA_NONE ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

static int fake_lock(int pid, struct cuda_lock_args *args)
{
    CHECK(args->timeout_ms > 0 && args->reserved0 == 0);
    return move('L', pid, CUDA_RUNNING, CUDA_LOCKED);
}

static int fake_checkpoint(int pid, struct cuda_checkpoint_args *args)
{
    CHECK(args->custom_storage == NULL);
    return move('C', pid, CUDA_LOCKED, CUDA_CHECKPOINTED);
}

static int fake_restore(int pid, struct cuda_restore_args *args)
{
    CHECK((args->pair_count == 0) == (args->pairs == NULL) && args->custom_storage == NULL);
    return move('R', pid, CUDA_CHECKPOINTED, CUDA_LOCKED);
}

static int fake_unlock(int pid, struct cuda_unlock_args *args)
{
    CHECK(args->reserved[0] == 0);
    return move('U', pid, CUDA_LOCKED, CUDA_RUNNING);
}

static enum cuda_load fake_load(struct cuda_driver *driver)
{
    *driver = (struct cuda_driver){.version = 13000,
                                   .init = fake_init,
                                   .get_error_name = fake_name,
                                   .get_error_string = fake_words,
                                   .device_get_count = fake_count,
                                   .device_get = fake_get,
                                   .device_get_uuid = fake_uuid,
                                   .device_get_name = fake_gpu_name,
                                   .device_total_mem = fake_memory,
                                   .get_state = fake_state,
                                   .lock = fake_lock,
                                   .checkpoint = fake_checkpoint,
                                   .restore = fake_restore,
                                   .unlock = fake_unlock};
    return CUDA_LOADED;
}

/* The steps, in this process --------------------------------------------------------------------- */

static struct cuda_driver driver;
static struct cuda_task tasks[PROCESSES];
static size_t count;
static struct kc_result result;
static int steps_until_cancel; /* -1: never */

static bool step(void *data, enum cuda_op op, pid_t pid, double limit)
{
    (void)data;
    CHECK(limit > 0.0 && (op == CUDA_OP_START || find(pid) < PROCESSES));
    if (steps_until_cancel > 0)
        steps_until_cancel--;
    return steps_until_cancel != 0;
}

static struct cuda_work reset(void)
{
    memset(fake, 0, sizeof(*fake));
    fake_load(&driver);
    count = PROCESSES;
    steps_until_cancel = -1;
    result = (struct kc_result){.reason = KC_OK};
    for (int i = 0; i < PROCESSES; i++) {
        fake->pid[i] = FIRST + i;
        tasks[i] = (struct cuda_task){.pid = FIRST + i, .found = CUDA_NONE, .memory = -1};
    }
    return (struct cuda_work){.driver = &driver,
                              .tasks = tasks,
                              .count = &count,
                              .lock_timeout = 0.05,
                              .copy_timeout = 0.2,
                              .step = step};
}

static void fail_with(char letter, size_t at, int times, int with)
{
    fake->fail = letter;
    fake->at = at;
    fake->times = times;
    fake->with = with;
}

static bool freeze(struct cuda_work *work)
{
    double lock_s;
    double copy_s;
    return cuda_tree_look(work, false, &result) &&
           cuda_tree_freeze(work, &lock_s, &copy_s, &result);
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
        fail_with(cases[i].letter, cases[i].at, -1, cases[i].error);
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
    fail_with('L', 0, -1, CUDA_ERROR_NOT_READY);
    CHECK(!freeze(&work) && strstr(result.message, "CUDA_ERROR_NOT_READY (device not ready)"));
    work = reset();
    fail_with('C', 1, -1, 12345);
    CHECK(!freeze(&work) && strstr(result.message, "CUDA error 12345"));
}

static void test_undo_fails(void)
{
    struct cuda_work work = reset();
    fail_with('C', 1, 1, 999);
    CHECK(!freeze(&work) && result.reason == KC_GPU_FAILED && all_are(CUDA_RUNNING));
    work = reset();
    CHECK(freeze(&work));
    fail_with('R', 1, -1, CUDA_ERROR_OUT_OF_MEMORY);
    work.retry_for = 0.15;
    CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_FULL);
    CHECK(fake->state[0] == CUDA_RUNNING && fake->state[1] == CUDA_CHECKPOINTED &&
          fake->state[2] == CUDA_RUNNING);
    /* Room came in time. */
    work = reset();
    CHECK(freeze(&work));
    fail_with('R', 1, 2, CUDA_ERROR_OUT_OF_MEMORY);
    work.retry_for = 5.0;
    CHECK(cuda_tree_return(&work, &result) && all_are(CUDA_RUNNING));
    work = reset();
    fail_with('U', 0, -1, 999);
    work.lock_timeout = 0.01;
    CHECK(freeze(&work));
    CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_STUCK);
    CHECK(fake->state[0] == CUDA_LOCKED && fake->state[1] == CUDA_RUNNING);
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
    fake->state[2] = CUDA_NONE;
    tasks[2].holds_device = true; /* CRIU could not save it */
    CHECK(!freeze(&work) && result.reason == KC_GPU_FAILED);
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

/* The helper ------------------------------------------------------------------------------------- */

static char folder[] = "/tmp/kernel-capture-cuda-XXXXXX";
static bool wanted = true;

static bool wait_for(void *data, int fd, int most)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    (void)data;
    poll(&ready, 1, most);
    return wanted;
}

/* A process that has a file mapped which is called like the driver. */
static pid_t start_target(void)
{
    char path[128];
    int ready[2];
    char byte;
    snprintf(path, sizeof(path), "%s/libcuda.so.1", folder);
    CHECK(pipe(ready) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
        CHECK(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) != MAP_FAILED);
        CHECK(write(ready[1], "r", 1) == 1);
        for (;;)
            pause();
    }
    CHECK(pid > 0 && read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
}

static bool begin(struct cuda *cuda, pid_t target, struct tree *tree)
{
    static struct args args;
    args = (struct args){.gpu_timeout = 0.2, .timeout = 0.5};
    *cuda = (struct cuda){.load = fake_load};
    reset();
    fake->pid[0] = target;
    CHECK(tree_collect(tree, target, true));
    return cuda_begin(cuda, tree, &args, wait_for, NULL, &result) && cuda->shared != NULL;
}

static void test_helper(void)
{
    struct cuda cuda;
    struct tree tree = {0};
    static struct json json;
    pid_t target = start_target();
    CHECK(begin(&cuda, target, &tree) && cuda_freeze(&cuda, &result));
    CHECK(fake->state[0] == CUDA_CHECKPOINTED && cuda.shared->gpu_count == 1);
    cuda_thaw(&cuda);
    CHECK(fake->state[0] == CUDA_RUNNING && cuda.problem.reason == KC_OK);
    json_begin(&json, "done");
    cuda_record(&cuda, &json);
    CHECK(json_finish(&json));
    CHECK(strstr(json.text, "\"uuid\":\"GPU-01010101-0101-0101-0101-010101010101\""));
    CHECK(strstr(json.text, "\"problem\":null"));
    cuda_end(&cuda);

    for (int with = CRASH; with <= HANG; with++) { /* in the middle: another helper puts it right */
        CHECK(begin(&cuda, target, &tree));
        fail_with('C', 0, 1, with);
        CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_GPU_FAILED);
        CHECK(fake->state[0] == CUDA_RUNNING);
    }
    CHECK(begin(&cuda, target, &tree)); /* before anything was done */
    fail_with('S', 0, -1, HANG);
    CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_GPU_FAILED);
    CHECK(begin(&cuda, target, &tree) && cuda_freeze(&cuda, &result));
    fail_with('U', 0, -1, HANG);
    cuda_thaw(&cuda);
    CHECK(cuda.problem.reason == KC_GPU_STUCK);
    CHECK(begin(&cuda, target, &tree)); /* cancelled */
    cuda.shared->lock_timeout = 60.0;
    fail_with('L', 0, -1, CUDA_ERROR_NOT_READY);
    wanted = false;
    CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_CANCELLED);
    wanted = true;
    CHECK(begin(&cuda, target, &tree)); /* it only has the library */
    fake->state[0] = CUDA_NONE;
    CHECK(cuda_freeze(&cuda, &result) && cuda.shared == NULL);

    /* Whoever asked is gone: it is undone. */
    CHECK(begin(&cuda, target, &tree) && cuda_freeze(&cuda, &result));
    close(cuda.socket);
    CHECK(waitpid(cuda.helper, NULL, 0) == cuda.helper && fake->state[0] == CUDA_RUNNING);
    kill(target, SIGKILL);
    CHECK(waitpid(target, NULL, 0) == target);
    tree_free(&tree);
}

static void test_no_driver(void)
{
    struct cuda cuda;
    struct args args = {.timeout = 1.0};
    struct tree tree = {0};
    reset();
    CHECK(tree_collect(&tree, getpid(), true));
    CHECK(cuda_begin(&cuda, &tree, &args, wait_for, NULL, &result) && cuda.shared == NULL);
    CHECK(cuda_freeze(&cuda, &result));
    cuda_thaw(&cuda);
    tree_free(&tree);
}

static void test_tasks_file(void)
{
    pid_t pids[CUDA_TASKS_MAX];
    int images = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(images >= 0 && cuda_read_tasks(images, pids) == 0);
    static const struct {
        const char *text;
        ssize_t count;
    } cases[] = {{"12\n34\n", 2}, {"", 0}, {"12\nx\n", -1}, {"-1\n", -1}, {"99999999999\n", -1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int fd = openat(images, "gpu-tasks", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && io_write_all(fd, cases[i].text, strlen(cases[i].text)));
        close(fd);
        CHECK(cuda_read_tasks(images, pids) == cases[i].count);
    }
    CHECK(unlinkat(images, "gpu-tasks", 0) == 0);
    close(images);
}

static void test_uuid(void)
{
    static const char text[] = "GPU-01234567-89ab-cdef-0123-456789abcdef";
    static const char *const bad[] = {"",
                                      "GPU-",
                                      "MIG-01234567-89ab-cdef-0123-456789abcdef",
                                      "GPU-01234567-89ab-cdef-0123-456789abcde",
                                      "GPU-01234567-89ab-cdef-0123-456789abcdeff",
                                      "GPU-0123456789ab-cdef-0123-456789abcdef-",
                                      "GPU-0123456g-89ab-cdef-0123-456789abcdef"};
    struct cuda_uuid uuid;
    char again[CUDA_UUID_TEXT];
    CHECK(cuda_parse_uuid(text, '\0', &uuid));
    CHECK(uuid.bytes[0] == 0x01 && uuid.bytes[15] == 0xef);
    cuda_format_uuid(&uuid, again);
    CHECK_STRING(again, text);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char *copy = check_copy(bad[i], strlen(bad[i]));
        CHECK(!cuda_parse_uuid(copy, '\0', &uuid));
        free(copy);
    }
}

static void test_loading(void)
{
    struct cuda_driver none;
    CHECK(cuda_driver_load_file("/no/such/libcuda.so.1", &none) == CUDA_NO_LIBRARY);
    CHECK(cuda_driver_load_file("libc.so.6", &none) == CUDA_NO_LIBRARY); /* another library */
}

int main(void)
{
    proc_open();
    CHECK(caps_init(&result) && mkdtemp(folder) != NULL);
    fake = mmap(NULL, sizeof(*fake), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(fake != MAP_FAILED);
    test_order();
    test_undo();
    test_undo_fails();
    test_states_that_were_there_before();
    test_restored();
    test_cancel_anywhere();
    test_uuid();
    test_loading();
    test_tasks_file();
    test_no_driver();
    test_helper();
    char path[128];
    snprintf(path, sizeof(path), "%s/libcuda.so.1", folder);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
    return 0;
}
