/* SPDX-License-Identifier: BSD-3-Clause */
/* What a transaction does about GPUs, and the process that calls the driver. */
#include "check.h"
#include "cuda.h"
#include "fake_driver.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "caps.h"
#include "cuda_find.h"
#include "io.h"
#include "procfs.h"

static struct kc_result result;
static char folder[] = "/tmp/kernel-capture-cuda-XXXXXX";
static bool wanted = true;
static int waits;

static bool wait_for(void *data, int fd, int most)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    (void)data;
    waits++;
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
    result = (struct kc_result){.reason = KC_OK};
    fake_reset();
    fake->pid[0] = target;
    CHECK(tree_collect(tree, target, true));
    if (!cuda_begin(cuda, tree, &args, wait_for, NULL, &result) || cuda->shared == NULL)
        return false;
    cuda->shared->deadline = cuda->deadline = io_now() + 60.0; /* of no interest to most */
    return true;
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
    CHECK(strstr(json.text, "\"problem\":null") && strstr(json.text, "\"driver\":null"));
    memset(cuda.shared->driver_version, 'v', sizeof(cuda.shared->driver_version)); /* no end */
    json_begin(&json, "done");
    cuda_record(&cuda, &json);
    CHECK(json_finish(&json));
    const char *version = strstr(json.text, "\"driver\":\"vvv");
    CHECK(version != NULL && strspn(version + 10, "v") == sizeof(cuda.shared->driver_version));
    cuda_end(&cuda);

    for (int with = CRASH; with <= HANG; with++) { /* in the middle: another helper puts it right */
        CHECK(begin(&cuda, target, &tree));
        fake_fail('C', 0, 1, with);
        CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_GPU_FAILED);
        CHECK(fake->state[0] == CUDA_RUNNING);
    }
    CHECK(begin(&cuda, target, &tree)); /* before anything was done */
    fake_fail('S', 0, -1, HANG);
    CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_GPU_FAILED);
    CHECK(begin(&cuda, target, &tree) && cuda_freeze(&cuda, &result));
    fake_fail('U', 0, -1, HANG);
    cuda_thaw(&cuda);
    CHECK(cuda.problem.reason == KC_GPU_STUCK);
    CHECK(begin(&cuda, target, &tree) && cuda_freeze(&cuda, &result));
    CHECK(kill(cuda.helper, SIGKILL) == 0); /* and for another one the driver does not start */
    fake->init = 999;
    fake_fail('S', 0, -1, CUDA_ERROR_NOT_INITIALIZED);
    cuda_thaw(&cuda);
    CHECK(cuda.problem.reason == KC_GPU_STUCK && fake->state[0] == CUDA_CHECKPOINTED);
    CHECK(begin(&cuda, target, &tree)); /* cancelled */
    cuda.shared->lock_timeout = 60.0;
    fake_fail('L', 0, -1, CUDA_ERROR_NOT_READY);
    wanted = false;
    CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_CANCELLED);
    wanted = true;
    CHECK(begin(&cuda, target, &tree)); /* it only has the library */
    fake->state[0] = CUDA_NONE;
    CHECK(cuda_freeze(&cuda, &result) && cuda.shared == NULL);

    CHECK(begin(&cuda, target, &tree) && cuda_freeze(&cuda, &result)); /* parked, and back */
    cuda_leave(&cuda);
    CHECK(fake->state[0] == CUDA_CHECKPOINTED);
    int parked = fake->state[0];
    CHECK(begin(&cuda, target, &tree));
    fake->state[0] = parked;
    CHECK(cuda_unpark(&cuda, &result) && fake->state[0] == CUDA_RUNNING && cuda.shared != NULL);
    for (int with = CRASH; with <= HANG; with++) { /* another helper goes on with it */
        CHECK(begin(&cuda, target, &tree));
        fake->state[0] = parked;
        fake_fail('R', 0, 1, with);
        CHECK(cuda_unpark(&cuda, &result) && fake->state[0] == CUDA_RUNNING);
        CHECK(begin(&cuda, target, &tree)); /* there is nothing yet to go on with */
        fake->state[0] = parked;
        fake_fail('S', 0, 1, with);
        CHECK(!cuda_unpark(&cuda, &result) && result.reason == KC_GPU_FAILED);
        CHECK(fake->state[0] == CUDA_CHECKPOINTED);
    }

    /* Whoever asked is gone: it is undone. */
    CHECK(begin(&cuda, target, &tree) && cuda_freeze(&cuda, &result));
    close(cuda.socket);
    CHECK(waitpid(cuda.helper, NULL, 0) == cuda.helper && fake->state[0] == CUDA_RUNNING);
    kill(target, SIGKILL);
    CHECK(waitpid(target, NULL, 0) == target);
    tree_free(&tree);
}

/* A helper in which the driver wrote over memory: no number of it is believed, and its messages delay nothing. */
static void test_nonsense(void)
{
    struct cuda cuda;
    struct tree tree = {0};
    pid_t target = start_target();
    for (int kind = 0; kind < 6; kind++) {
        double started = io_now();
        CHECK(begin(&cuda, target, &tree));
        fake->slow_ms = kind; /* which number it is */
        fake_fail('L', 0, 1, kind < 5 ? NONSENSE : SHORT);
        CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_GPU_FAILED);
        CHECK(fake->state[0] == CUDA_RUNNING && io_now() - started < 30.0);
        fake->slow_ms = 0;
    }
    CHECK(begin(&cuda, target, &tree));
    cuda.deadline = io_now() + 0.2; /* the helper takes longer, and says so all the time */
    cuda.undo_limit = 0.5 - CUDA_GRACE;
    waits = 0;
    fake_fail('L', 0, 1, FLOOD);
    double started = io_now();
    /* What undoes it then has no time left either. */
    CHECK(!cuda_freeze(&cuda, &result) && io_now() - started < 45.0 && waits > 1);
    CHECK(result.reason == KC_GPU_FAILED || result.reason == KC_GPU_STUCK);
    /* A driver that does not start: the deadline is that of the transaction. */
    CHECK(begin(&cuda, target, &tree));
    cuda.deadline = io_now() + 0.1 - CUDA_GRACE;
    fake_fail('S', 0, 1, HANG);
    started = io_now();
    CHECK(!cuda_freeze(&cuda, &result) && result.reason == KC_GPU_FAILED);
    CHECK(io_now() - started < 45.0 && fake->state[0] == CUDA_RUNNING);
    kill(target, SIGKILL);
    CHECK(waitpid(target, NULL, 0) == target);
    cuda_end(&cuda);
    tree_free(&tree);
}

/* What the helper says of its steps before it is done, one letter each; capitals: it may take as long as a start. */
static void steps_of(struct cuda_shared *shared, char *text, size_t capacity)
{
    static const char letters[] = "slkcru";
    struct cuda_message message = {.done = false};
    int in;
    pid_t helper = cuda_helper_start(shared, fake_load, &in);
    CHECK(helper > 0 && io_write_all(in, &(char){CUDA_GO}, 1));
    for (size_t i = 0; i + 1 < capacity; i++) {
        text[i] = '\0';
        CHECK(recv(in, &message, sizeof(message), 0) == (ssize_t)sizeof(message));
        if (message.done)
            break;
        char letter = letters[message.op];
        text[i] = (char)(message.limit < CUDA_START_LIMIT ? letter : letter + 'A' - 'a');
    }
    CHECK(message.done && io_write_all(in, &(char){CUDA_QUIT}, 1));
    close(in);
    CHECK(waitpid(helper, NULL, 0) == helper);
}

/* The driver and the management library are given their time, however short the others are. */
static void test_starts(void)
{
    struct cuda cuda;
    struct tree tree = {0};
    char text[64];
    pid_t target = start_target();
    CHECK(begin(&cuda, target, &tree));
    cuda.shared->mode = CUDA_DUMP;
    steps_of(cuda.shared, text, sizeof(text));
    CHECK_STRING(text, "lSSkc");
    cuda.shared->mode = CUDA_REPAIR;
    steps_of(cuda.shared, text, sizeof(text));
    CHECK_STRING(text, "Slrlu");
    kill(target, SIGKILL);
    CHECK(waitpid(target, NULL, 0) == target && fake->state[0] == CUDA_RUNNING);
    cuda_end(&cuda);
    tree_free(&tree);
}

static void test_no_driver(void)
{
    struct cuda cuda;
    struct args args = {.timeout = 1.0};
    struct tree tree = {0};
    CHECK(tree_collect(&tree, getpid(), true));
    CHECK(cuda_begin(&cuda, &tree, &args, wait_for, NULL, &result) && cuda.shared == NULL);
    CHECK(cuda_freeze(&cuda, &result));
    cuda_thaw(&cuda);
    tree_free(&tree);
}

/* What /proc does not let be seen is no process without a GPU. */
static void test_what_cannot_be_seen(void)
{
    struct cuda cuda;
    struct args args = {.timeout = 1.0};
    struct tree tree = {0};
    pid_t pids[CUDA_TASKS_MAX];
    static struct cuda_task tasks[CUDA_TASKS_MAX];
    size_t count = 0;
    int images = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(images >= 0 && tree_collect(&tree, getpid(), true));
    CHECK(cuda_maps_driver(getpid()) == CUDA_SEEN_NO);
    CHECK(cuda_describe(getpid(), &tasks[0]) == CUDA_SEEN_YES);
    CHECK(cuda_find(getpid(), tasks, &count, &result) && count == 0);
    pid_t child = fork();
    if (child == 0) {
        const struct rlimit none = {0, 0};
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0); /* the next file cannot be opened */
        CHECK(cuda_maps_driver(getppid()) == CUDA_SEEN_UNKNOWN && errno == EMFILE);
        CHECK(cuda_describe(getppid(), &tasks[0]) == CUDA_SEEN_UNKNOWN && errno == EMFILE);
        CHECK(cuda_read_tasks(images, pids) == -1);
        CHECK(!cuda_find(getppid(), tasks, &count, &result) && result.reason == KC_GPU_FAILED);
        result = (struct kc_result){.reason = KC_OK};
        CHECK(!cuda_begin(&cuda, &tree, &args, wait_for, NULL, &result));
        CHECK(result.reason == KC_GPU_FAILED && strstr(result.message, "Too many open files"));
        _exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
          WEXITSTATUS(status) == 0);
    CHECK(cuda_maps_driver(child) == CUDA_SEEN_NO); /* it has ended */
    CHECK(cuda_describe(child, &tasks[0]) == CUDA_SEEN_NO);
    CHECK(cuda_find(child, tasks, &count, &result) && count == 0);
    int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0 && cuda_read_tasks(file, pids) == -1); /* that is no directory */
    close(file);
    close(images);
    tree_free(&tree);
}

static void test_one_process_too_many(void)
{
    struct cuda cuda;
    struct tree tree = {0};
    pid_t target = start_target();
    for (size_t before = CUDA_TASKS_MAX - 1; before <= CUDA_TASKS_MAX; before++) {
        CHECK(begin(&cuda, target, &tree));
        for (size_t i = 0; i < before; i++)
            cuda.shared->tasks[i] = (struct cuda_task){.pid = 1, .found = CUDA_NONE};
        cuda.shared->count = before;
        bool fits = before < CUDA_TASKS_MAX;
        CHECK(cuda_freeze(&cuda, &result) == fits);
        CHECK(fits || (result.reason == KC_GPU_UNSUPPORTED && strstr(result.message, "than 512")));
        CHECK_STRING(fake->calls, fits ? "L0 C0 " : "");
        cuda_end(&cuda);
    }
    kill(target, SIGKILL);
    CHECK(waitpid(target, NULL, 0) == target);
    tree_free(&tree);
}

/* As many processes and GPUs as may be, and whatever is written there. */
static void test_the_longest_record(void)
{
    static struct cuda_shared shared;
    struct cuda cuda = {.shared = &shared, .problem = {.reason = KC_GPU_FAILED}};
    static struct json json;
    memset(&shared, '"', sizeof(shared)); /* no text has an end */
    memset(cuda.problem.message, '\n', sizeof(cuda.problem.message) - 1);
    shared.count = CUDA_TASKS_MAX;
    shared.gpu_count = CUDA_GPUS_MAX;
    for (size_t i = 0; i < CUDA_TASKS_MAX; i++) {
        shared.tasks[i].parked = shared.tasks[i].stored = false; /* no text */
        shared.tasks[i].pid = INT_MAX;
        shared.tasks[i].memory = INT64_MAX;
    }
    json_begin(&json, "done");
    cuda_record(&cuda, &json);
    CHECK(json_finish(&json) && json.length > (size_t)CUDA_TASKS_MAX * CUDA_VISIBLE_MAX);
    CHECK(strstr(json.text, "\"mappings\":null")); /* what stands there is out of bounds */
    shared.tasks[0].range_at = shared.tasks[1].range_at = 0; /* all there may be, and once more */
    shared.tasks[0].range_count = shared.tasks[1].range_count = CUDA_RANGES_MAX;
    memset(shared.ranges, 0xff, sizeof(shared.ranges));
    json_begin(&json, "done");
    cuda_record(&cuda, &json);
    CHECK(json_finish(&json) && json.length > (size_t)CUDA_RANGES_MAX * 36);
    CHECK(strstr(json.text, "\"mappings\":[\"ffffffffffffffff-ffffffffffffffff\",\"ffff"));
    shared.tasks[0].range_count = 1;
    shared.ranges[0] = (struct cuda_range){0x7f0000000000, 0x7f0000002000};
    shared.count = 1;
    snprintf(shared.tasks[0].visible, CUDA_VISIBLE_MAX, "%s", "1,\t\"2\",\xc3\xa9");
    json_begin(&json, "done");
    cuda_record(&cuda, &json);
    CHECK(json_finish(&json) && strstr(json.text, "\"visible\":\"1, ?2?,??\""));
    CHECK(strstr(json.text, "\"mappings\":[\"7f0000000000-7f0000002000\"]"));
    shared.tasks[0].stored = true;
    json_begin(&json, "done");
    cuda_record(&cuda, &json);
    CHECK(json_finish(&json) && strstr(json.text, "\"mappings\":[]"));
}

/* CUDA_VISIBLE_DEVICES of that many bytes. */
static pid_t start_with_visible(size_t length)
{
    static char value[4096];
    memset(value, '7', length);
    value[length] = '\0';
    int ready[2];
    int quiet[2];
    char byte;
    CHECK(pipe(ready) == 0 && pipe(quiet) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        char wait[] = "echo; read nothing; exit";
        char shell[] = "sh";
        char option[] = "-c";
        char *argv[] = {shell, option, wait, NULL};
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(quiet[0], STDIN_FILENO);
        dup2(ready[1], STDOUT_FILENO);
        setenv("CUDA_VISIBLE_DEVICES", value, 1);
        execv("/bin/sh", argv);
        _exit(127);
    }
    CHECK(pid > 0 && read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    close(quiet[0]); /* the other end stays: nothing comes, and no end */
    return pid;
}

static void test_visible(void)
{
    static const size_t lengths[] = {16 * 41 - 1, CUDA_VISIBLE_MAX - 1, CUDA_VISIBLE_MAX, 4000};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct cuda_task task;
        pid_t pid = start_with_visible(lengths[i]);
        CHECK(cuda_describe(pid, &task) == CUDA_SEEN_YES);
        CHECK(task.visible_is_cut == (lengths[i] >= CUDA_VISIBLE_MAX));
        CHECK(task.visible_is_cut || strlen(task.visible) == lengths[i]);
        kill(pid, SIGKILL);
        CHECK(waitpid(pid, NULL, 0) == pid);
    }
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
    fake_make();
    fake_reset();
    test_uuid();
    test_loading();
    test_tasks_file();
    test_no_driver();
    test_what_cannot_be_seen();
    test_one_process_too_many();
    test_the_longest_record();
    test_visible();
    test_helper();
    test_nonsense();
    test_starts();
    char path[128];
    snprintf(path, sizeof(path), "%s/libcuda.so.1", folder);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
    return 0;
}
