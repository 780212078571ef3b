/* UCX: tagged messages, 8 bytes one way, the value the other way. UCX_TLS chooses the transport.
   Usage: ucx sleep|look BYTES MILLISECONDS [ADDRESS]; without an address it serves, and prints `ready ADDRESS`. */
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include "timing.h"

enum { HELLO = 1, ASK = 2, ANSWER = 3, HELLO_BYTES_MAX = 4096 };

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h peer;
static int sleeps, event_fd;
static char *value;
static size_t bytes;

static void check(ucs_status_t status, const char *what) {
    if (status != UCS_OK) {
        fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
        exit(1);
    }
}

static void open_worker(void) {
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                         .thread_mode = UCS_THREAD_MODE_SINGLE};
    if (sleeps) {
        params.features |= UCP_FEATURE_WAKEUP;
    }
    check(ucp_init(&params, NULL, &context), "ucp_init");
    check(ucp_worker_create(context, &worker_params, &worker), "ucp_worker_create");
    if (sleeps) {
        check(ucp_worker_get_efd(worker, &event_fd), "ucp_worker_get_efd");
    }
}

static void connect_to(const void *address) {
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = address};
    check(ucp_ep_create(worker, &params, &peer), "ucp_ep_create");
}

/* A server also ends when its parent closes its standard input. */
static void wait_for_event(int is_server) {
    struct pollfd polled[2] = {{.fd = event_fd, .events = POLLIN}, {.fd = 0, .events = POLLIN}};
    ucs_status_t status = ucp_worker_arm(worker);
    if (status == UCS_ERR_BUSY) {
        return;
    }
    check(status, "ucp_worker_arm");
    if (poll(polled, is_server ? 2 : 1, -1) > 0 && is_server && polled[1].revents) {
        exit(0);
    }
}

static void parent_is_there(void) {
    struct pollfd polled = {.fd = 0, .events = POLLIN};
    if (poll(&polled, 1, 0) > 0) {
        exit(0);
    }
}

static void finish(ucs_status_ptr_t request, int is_server) {
    unsigned idle = 0;
    if (request == NULL) {
        return;
    }
    if (UCS_PTR_IS_ERR(request)) {
        check(UCS_PTR_STATUS(request), "a message");
    }
    while (ucp_request_check_status(request) == UCS_INPROGRESS) {
        if (ucp_worker_progress(worker)) {
            idle = 0;
        } else if (sleeps) {
            wait_for_event(is_server);
        } else if (is_server && ++idle % 1000000 == 0) {
            parent_is_there();
        }
    }
    check(ucp_request_check_status(request), "a message");
    ucp_request_free(request);
}

static void send_message(const void *from, size_t length, ucp_tag_t tag, int is_server) {
    ucp_request_param_t params = {0};
    finish(ucp_tag_send_nbx(peer, from, length, tag, &params), is_server);
}

static void receive(void *into, size_t length, ucp_tag_t tag, int is_server) {
    ucp_request_param_t params = {0};
    finish(ucp_tag_recv_nbx(worker, into, length, tag, (ucp_tag_t)-1, &params), is_server);
}

static void pull(void) {
    uint64_t number = 8;
    ucp_request_param_t params = {0};
    /* Posted first, so that the value lands in its buffer directly. */
    ucs_status_ptr_t answer = ucp_tag_recv_nbx(worker, value, bytes, ANSWER, (ucp_tag_t)-1, &params);
    send_message(&number, sizeof number, ASK, 0);
    finish(answer, 0);
}

static void measure(const char *digits, double length) {
    static unsigned char address[HELLO_BYTES_MAX], hello[HELLO_BYTES_MAX];
    ucp_address_t *own;
    size_t own_bytes, count = strlen(digits) / 2;
    for (size_t at = 0; at < count && at < sizeof address; at++) {
        unsigned byte = 0;
        sscanf(digits + 2 * at, "%2x", &byte);
        address[at] = (unsigned char)byte;
    }
    connect_to(address);
    check(ucp_worker_get_address(worker, &own, &own_bytes), "ucp_worker_get_address");
    if (own_bytes > sizeof hello) {
        fail("a longer address than expected");
    }
    memcpy(hello, own, own_bytes);
    send_message(hello, sizeof hello, HELLO, 0);
    time_and_print(pull, length);
}

static void serve(void) {
    static unsigned char hello[HELLO_BYTES_MAX];
    uint64_t number = 0;
    ucp_address_t *own;
    size_t own_bytes;
    check(ucp_worker_get_address(worker, &own, &own_bytes), "ucp_worker_get_address");
    printf("ready ");
    for (size_t at = 0; at < own_bytes; at++) {
        printf("%02x", ((unsigned char *)own)[at]);
    }
    printf("\n");
    fflush(stdout);
    receive(hello, sizeof hello, HELLO, 1);
    connect_to(hello);
    for (;;) {
        receive(&number, sizeof number, ASK, 1);
        send_message(value, bytes, ANSWER, 1);
    }
}

int main(int count, char **arguments) {
    if (count < 4) {
        fail("usage: ucx sleep|look BYTES MILLISECONDS [ADDRESS]");
    }
    sleeps = strcmp(arguments[1], "sleep") == 0;
    bytes = (size_t)atol(arguments[2]);
    value = malloc(bytes);
    memset(value, 7, bytes);
    open_worker();
    if (count == 4) {
        serve();
    }
    measure(arguments[4], atof(arguments[3]) / 1e3);
    return 0;
}
