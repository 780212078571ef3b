// Gloo: buffers of a pair over TCP, 8 bytes one way, the value the other way.
// Usage: gloo sleep|look BYTES MILLISECONDS DIRECTORY server|client; both find each other through the directory.
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "timing.h"

namespace {

std::unique_ptr<gloo::transport::Buffer> ask, answer;

void pull() {
    ask->send(0, sizeof(uint64_t));
    ask->waitSend();
    answer->waitRecv();
}

void serve(size_t bytes) {
    for (;;) {
        ask->waitRecv();
        answer->send(0, bytes);
        answer->waitSend();
    }
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 6) {
        fail("usage: gloo sleep|look BYTES MILLISECONDS DIRECTORY server|client");
    }
    const bool looks = std::string(arguments[1]) == "look";
    const size_t bytes = std::stoul(arguments[2]);
    const bool is_server = std::string(arguments[5]) == "server";
    std::vector<char> value(bytes, 7);
    uint64_t number = 8;

    if (is_server) {
        printf("ready %s\n", arguments[4]);
        fflush(stdout);
        std::thread([] {
            char byte;
            while (read(0, &byte, 1) > 0) {
            }
            _exit(0);
        }).detach();
    }
    gloo::transport::tcp::attr where("127.0.0.1");
    gloo::rendezvous::FileStore store(arguments[4]);
    auto context = std::make_shared<gloo::rendezvous::Context>(is_server ? 1 : 0, 2);
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(where);
    context->connectFullMesh(store, device);
    auto &pair = context->getPair(is_server ? 0 : 1);
    if (looks) {
        pair->setSync(true, true);
    }
    if (is_server) {
        ask = pair->createRecvBuffer(0, &number, sizeof number);
        answer = pair->createSendBuffer(1, value.data(), bytes);
        serve(bytes);
    }
    ask = pair->createSendBuffer(0, &number, sizeof number);
    answer = pair->createRecvBuffer(1, value.data(), bytes);
    time_and_print(pull, std::stod(arguments[3]) / 1e3);
    _exit(0);
}
