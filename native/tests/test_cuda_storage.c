/* SPDX-License-Identifier: BSD-3-Clause */
/* Device memory in files, with a driver that says what it does not do, and frees what is complete. */
#include "cuda_storage.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "cuda_copy.h"
#include "fake_driver.h"
#include "io.h"

enum { GPUS = 2, SIZE = (33 << 20) + 5 };

static struct cuda_driver driver;
static struct cuda_task task;
static size_t count = 1;
static struct kc_result result;
static char path[] = "/tmp/kernel-capture-storage-XXXXXX";
static int folder;

static unsigned char *device[GPUS], *copy[GPUS];
static int state, gpus_with_memory, current;
static bool swapped; /* the GPUs have changed places */
static struct cuda_storage_info *shown;
static char operation; /* its address names it */
static int retains_fail, completions, completions_fail, silent; /* so many looks are not answered */
static bool in_host; /* it copies to the host, whatever it is asked for */
static bool forgets; /* it says that it failed, once it has done so */
static int steps; /* after so many it is given up; -1: never */
static int64_t memory_left; /* bytes that this process may take from then on; -1: what it likes */

static int retain(void **context, int ordinal)
{
    *context = &device[ordinal];
    return retains_fail-- > 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static int set_context(void *context)
{
    current = context == &device[0] ? 0 : 1;
    return CUDA_SUCCESS;
}

static int context_device(int *ordinal)
{
    *ordinal = current;
    return CUDA_SUCCESS;
}

static int stream_context(void *stream, void **context)
{
    *context = stream;
    return CUDA_SUCCESS;
}

static int wait_stream(void *stream)
{
    CHECK(stream != NULL);
    return CUDA_SUCCESS;
}

static int device_count(int *all)
{
    *all = GPUS;
    return CUDA_SUCCESS;
}

/* By place; the names stay with the GPUs. */
static int device_uuid(struct cuda_uuid *uuid, int ordinal)
{
    memset(uuid, swapped ? GPUS - ordinal : ordinal + 1, sizeof(*uuid));
    return CUDA_SUCCESS;
}

static int to_host(void *to, uint64_t from, size_t size, void *stream)
{
    CHECK(stream == &device[current] && shown != NULL);
    memcpy(to, (const void *)(uintptr_t)from, size);
    return CUDA_SUCCESS;
}

static int to_device(uint64_t to, const void *from, size_t size, void *stream)
{
    CHECK(stream == &device[current] && shown != NULL);
    memcpy((void *)(uintptr_t)to, from, size);
    return CUDA_SUCCESS;
}

static int pin(void *memory, size_t size, unsigned flags)
{
    (void)flags;
    return memory != NULL && size > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int get_state(int pid, int *now)
{
    CHECK(pid == FIRST);
    *now = state;
    return silent-- > 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

static void show(struct cuda_storage_info **info)
{
    shown = calloc(1, sizeof(*shown));
    struct cuda_storage_part *parts = calloc(GPUS, sizeof(*parts));
    CHECK(shown != NULL && parts != NULL);
    for (int i = 0; i < gpus_with_memory; i++)
        parts[i] = (struct cuda_storage_part){(uintptr_t)device[i], SIZE, &device[i]};
    *shown = (struct cuda_storage_info){&operation, parts, (unsigned)gpus_with_memory};
    *info = shown;
}

static int checkpoint(int pid, struct cuda_checkpoint_args *args)
{
    CHECK(pid == FIRST && state == CUDA_LOCKED && args->custom_storage != NULL);
    state = in_host ? CUDA_CHECKPOINTED : CUDA_CHECKPOINTING;
    if (!in_host)
        show(args->custom_storage);
    return CUDA_SUCCESS;
}

static int restore(int pid, struct cuda_restore_args *args)
{
    CHECK(pid == FIRST && state == CUDA_CHECKPOINTED);
    CHECK((args->custom_storage == NULL) == in_host);
    state = in_host ? CUDA_LOCKED : CUDA_RESTORING;
    if (!in_host)
        show(args->custom_storage);
    return CUDA_SUCCESS;
}

static int complete(void *named)
{
    CHECK(named == &operation && shown != NULL); /* else it is complete already */
    completions++;
    if (completions_fail-- > 0)
        return 999;
    for (int i = 0; i < GPUS && state == CUDA_CHECKPOINTING; i++)
        memset(device[i], 0, SIZE);
    state = state == CUDA_CHECKPOINTING ? CUDA_CHECKPOINTED : CUDA_LOCKED;
    free(shown->parts);
    free(shown);
    shown = NULL;
    return forgets ? 999 : CUDA_SUCCESS;
}

static int lock(int pid, struct cuda_lock_args *args)
{
    CHECK(pid == FIRST && args->timeout_ms > 0 && state == CUDA_RUNNING);
    state = CUDA_LOCKED;
    return CUDA_SUCCESS;
}

static int unlock(int pid, struct cuda_unlock_args *args)
{
    CHECK(pid == FIRST && args != NULL && state == CUDA_LOCKED);
    state = CUDA_RUNNING;
    return CUDA_SUCCESS;
}

static void limit_memory(int64_t more)
{
    struct rlimit limit;
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%*s %*s %*s %*s %*s %lu", &pages) == 1 && fclose(file) == 0);
    CHECK(getrlimit(RLIMIT_DATA, &limit) == 0);
    limit.rlim_cur = more < 0 ? limit.rlim_max : pages * 4096 + (rlim_t)more;
    CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
}

static bool step(void *data, enum cuda_op op, pid_t pid, double limit)
{
    (void)data;
    CHECK(pid == FIRST && limit > 0.0 && op != CUDA_OP_START);
    if (steps > 0 && --steps == 0)
        limit_memory(memory_left);
    return steps != 0;
}

static struct cuda_work reset(int gpus)
{
    fake_load(&driver);
    driver.custom_storage = true;
    driver.device_get_count = device_count;
    driver.device_get_uuid = device_uuid;
    driver.retain_context = retain;
    driver.set_context = set_context;
    driver.context_device = context_device;
    driver.stream_context = stream_context;
    driver.wait_stream = wait_stream;
    driver.to_host = to_host;
    driver.to_device = to_device;
    driver.pin = pin;
    driver.get_state = get_state;
    driver.checkpoint = checkpoint;
    driver.restore = restore;
    driver.complete = complete;
    driver.lock = lock;
    driver.unlock = unlock;
    gpus_with_memory = gpus;
    state = CUDA_RUNNING;
    swapped = in_host = forgets = false;
    retains_fail = completions = completions_fail = silent = 0;
    steps = -1;
    memory_left = -1;
    result = (struct kc_result){.reason = KC_OK};
    task = (struct cuda_task){.pid = FIRST, .found = CUDA_RUNNING, .memory = -1};
    for (int i = 0; i < GPUS; i++) {
        memset(device[i], 'a' + i, SIZE);
        device[i][SIZE - 1] = '.';
        memcpy(copy[i], device[i], SIZE);
    }
    return (struct cuda_work){.driver = &driver,
                              .tasks = &task,
                              .count = &count,
                              .lock_timeout = 1.0,
                              .copy_timeout = 1.0,
                              .step = step,
                              .folder = folder,
                              .store = true};
}

static bool freeze(struct cuda_work *work)
{
    double lock_s;
    double copy_s;
    return cuda_tree_freeze(work, &lock_s, &copy_s, &result);
}

static bool is_whole(void)
{
    for (int i = 0; i < gpus_with_memory; i++)
        if (memcmp(device[i], copy[i], SIZE) != 0)
            return false;
    return state == CUDA_RUNNING && shown == NULL;
}

static bool is_there(void)
{
    return faccessat(folder, "gpu-memory-100", F_OK, 0) == 0;
}

static void test_there_and_back(void)
{
    for (int gpus = 0; gpus <= GPUS; gpus++) {
        struct cuda_work work = reset(gpus);
        CHECK(freeze(&work) && task.stored && state == CUDA_CHECKPOINTED && completions == 1);
        CHECK(task.memory == (int64_t)gpus * SIZE && cuda_storage_has(folder, FIRST) == 1);
        CHECK(gpus == 0 || device[0][0] == 0);
        CHECK(cuda_tree_return(&work, &result) && is_whole() && completions == 2);
    }
}

/* What was done is not done again: the driver has freed what it was called with. */
static void test_the_driver_does_not_tell(void)
{
    for (int looks = 0; looks < 3; looks++)
        for (int failed = 0; failed < 2; failed++) {
            struct cuda_work work = reset(1);
            silent = looks;
            forgets = failed == 1;
            CHECK(freeze(&work) && task.stored && completions == 1);
            silent = 0;
            CHECK(cuda_tree_return(&work, &result) && is_whole());
        }
    struct cuda_work work = reset(1);
    silent = 3; /* then it is undone, and that is possible */
    CHECK(!freeze(&work) && result.reason == KC_GPU_FAILED && is_whole());
    work = reset(1);
    completions_fail = 2;
    CHECK(freeze(&work) && completions == 3);
    CHECK(cuda_tree_return(&work, &result) && is_whole());
    work = reset(1);
    completions_fail = 1000;
    CHECK(!freeze(&work) && result.reason == KC_GPU_STUCK && state == CUDA_CHECKPOINTING);
    free(shown->parts);
    free(shown);
    shown = NULL;
}

static void test_the_driver_copies_to_the_host(void)
{
    struct cuda_work work = reset(1);
    in_host = true;
    CHECK(freeze(&work) && task.copied && !task.stored && !is_there());
    CHECK(cuda_tree_return(&work, &result) && is_whole());
}

static void test_contexts(void)
{
    reset(1);
    retains_fail = 1;
    CHECK(!cuda_storage_contexts(&driver));
    CHECK(cuda_storage_contexts(&driver));
    retains_fail = 1; /* once they are there they stay */
    CHECK(cuda_storage_contexts(&driver));
}

/* Whenever it is: nothing of the memory is lost, wherever there is room for it. */
static void test_given_up(void)
{
    int came = 0;
    int went_on = 0;
    for (int room = 0; room < 2; room++)
        for (int at = 1;; at++) {
            struct cuda_work work = reset(GPUS);
            steps = at;
            memory_left = room == 0 ? 1 << 20 : -1; /* without, it goes on with the file */
            bool done = freeze(&work);
            limit_memory(-1);
            /* Whoever asked for it looks whether it is still wanted. */
            CHECK(done ? cuda_tree_return(&work, &result) : result.reason == KC_CANCELLED);
            CHECK(is_whole());
            if (steps > 0)
                break;
            came += !done;
            went_on += done;
        }
    CHECK(came > 8 && went_on > 4);
    struct cuda_work work = reset(GPUS); /* the same for the deadline */
    work.deadline = io_now() + 0.001;
    CHECK(!freeze(&work) && result.reason == KC_TIMEOUT && is_whole());
}

/* A file that takes only so much: what it has not got is in memory, all of it or the rest. */
static void test_a_file_that_is_full(void)
{
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    signal(SIGXFSZ, SIG_IGN);
    for (int room = 0; room < 3; room++) {
        struct rlimit now = {.rlim_cur = 40 << 20, .rlim_max = before.rlim_max};
        struct cuda_work work = reset(GPUS);
        CHECK(cuda_blocks_make() && setrlimit(RLIMIT_FSIZE, &now) == 0);
        limit_memory(room == 0 ? -1 : room == 1 ? 2 * SIZE - (10 << 20) : 10 << 20);
        CHECK(!freeze(&work));
        limit_memory(-1);
        CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
        if (room < 2) {
            CHECK(result.reason == KC_NO_SPACE && is_whole());
            continue;
        }
        CHECK(result.reason == KC_GPU_STUCK && strstr(result.message, "room neither in the folder"));
        free(shown->parts);
        free(shown);
        shown = NULL;
    }
}

/* Without pairs the driver puts what was first on what is first now. */
static void test_gpus_that_changed_places(void)
{
    struct cuda_work work = reset(GPUS);
    CHECK(freeze(&work));
    swapped = true;
    CHECK(!cuda_tree_return(&work, &result) && result.reason == KC_GPU_FAILED);
    CHECK(strstr(result.message, "is not what the driver wants") && state == CUDA_RESTORING);
    free(shown->parts);
    free(shown);
    shown = NULL;
}

static void test_files(void)
{
    struct stat status;
    struct cuda_work work = reset(1);
    unlinkat(folder, "gpu-memory-100", 0);
    int fd = openat(folder, "gpu-memory-100", O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    CHECK(fd >= 0 && fchmod(fd, 0644) == 0);
    CHECK(freeze(&work) && fstat(fd, &status) == 0 && status.st_size == 0 && status.st_nlink == 0);
    CHECK(fstatat(folder, "gpu-memory-100", &status, 0) == 0 && (status.st_mode & 0777) == 0600);
    CHECK(cuda_tree_return(&work, &result) && is_whole());
    close(fd);
    /* A list that cannot be read is not taken for none. */
    CHECK(cuda_storage_has(folder, FIRST + 1) == 0);
    CHECK(unlinkat(folder, "gpu-memory-100.parts", 0) == 0);
    CHECK(symlinkat("gpu-memory-nowhere", folder, "gpu-memory-100.parts") == 0);
    CHECK(cuda_storage_has(folder, FIRST) == -1);
    CHECK(cuda_storage_has(-1, FIRST) == -1);
    CHECK(!cuda_storage_room(folder, INT64_MAX));
}

int main(void)
{
    for (int i = 0; i < GPUS; i++) {
        device[i] = malloc(SIZE);
        copy[i] = malloc(SIZE);
        CHECK(device[i] != NULL && copy[i] != NULL);
    }
    CHECK(mkdtemp(path) != NULL);
    folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(folder >= 0);
    test_contexts();
    test_there_and_back();
    test_the_driver_does_not_tell();
    test_the_driver_copies_to_the_host();
    test_given_up();
    test_a_file_that_is_full();
    test_files();
    test_gpus_that_changed_places();
    unlinkat(folder, "gpu-memory-100", 0);
    unlinkat(folder, "gpu-memory-100.parts", 0);
    rmdir(path);
    for (int i = 0; i < GPUS; i++) {
        free(device[i]);
        free(copy[i]);
    }
    return 0;
}
