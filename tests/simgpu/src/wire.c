// SPDX-License-Identifier: BSD-3-Clause
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "abi.h"

void sim_machine_folder(char folder[SIM_FOLDER])
{
    const char *named = getenv("SIMGPU_MACHINE");
    snprintf(folder, SIM_FOLDER, "%s", named && *named ? named : "/run/simgpu");
}

int sim_connect(const char *folder)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int directory = -1;
    int length = snprintf(address.sun_path, sizeof(address.sun_path), "%s/nvidiactl", folder);
    if (length < 0 || (size_t)length >= sizeof(address.sun_path)) {
        // Too long for a socket's name: go through the open folder.
        directory = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (directory < 0)
            return -1;
        snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/nvidiactl",
                 directory);
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        int error = errno;
        close(fd);
        errno = error;
        fd = -1;
    }
    if (directory >= 0)
        close(directory);
    return fd;
}

static bool write_all(int fd, const void *data, size_t length)
{
    const char *at = data;
    while (length > 0) {
        ssize_t done = send(fd, at, length, MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        at += done;
        length -= (size_t)done;
    }
    return true;
}

static bool read_all(int fd, void *data, size_t length)
{
    char *at = data;
    while (length > 0) {
        ssize_t done = recv(fd, at, length, 0);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return false;
        at += done;
        length -= (size_t)done;
    }
    return true;
}

static int call_locked(int fd, const struct sim_request *request, const void *payload, void *out,
                       size_t out_size, uint64_t *value)
{
    struct sim_reply reply;
    if (fd < 0 || !write_all(fd, request, sizeof(*request)) ||
        (payload && !write_all(fd, payload, request->length)) ||
        !read_all(fd, &reply, sizeof(reply)) || reply.length > out_size ||
        (reply.length > 0 && !read_all(fd, out, reply.length)))
        return CUDA_ERROR_UNKNOWN;
    if (value)
        *value = reply.value;
    return reply.status;
}

int sim_call(struct sim_connection *connection, struct sim_request request, const void *payload,
             void *out, size_t out_size, uint64_t *value)
{
    pthread_mutex_lock(&connection->mutex);
    int status = call_locked(connection->fd, &request, payload, out, out_size, value);
    pthread_mutex_unlock(&connection->mutex);
    return status;
}

bool sim_describe(const char *folder, struct sim_machine *machine)
{
    struct sim_connection connection = {sim_connect(folder), PTHREAD_MUTEX_INITIALIZER};
    if (connection.fd < 0)
        return false;
    memset(machine, 0, sizeof(*machine));
    int status = sim_call(&connection, (struct sim_request){.op = SIM_HELLO}, NULL, machine,
                          sizeof(*machine), NULL);
    close(connection.fd);
    return status == CUDA_SUCCESS && machine->gpu_count <= SIM_MAX_GPUS;
}
