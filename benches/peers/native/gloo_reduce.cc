// Gloo: the sum of 32-bit floats of all ranks, in place, over TCP; or a barrier.
// Usage: gloo_reduce sleep|look BYTES MILLISECONDS DIRECTORY ring|chunked|halving|bcube|barrier-all|barrier-one RANK RANKS; ranks find
// each other through the directory.
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "timing.h"

namespace {

std::unique_ptr<gloo::Algorithm> algorithm;
std::shared_ptr<gloo::Context> others, everybody;

void reduce() {
    algorithm->run();
}

long first_says(long number) {
    gloo::BroadcastOptions options(others);
    options.setOutput(&number, 1);
    options.setRoot(0);
    gloo::broadcast(options);
    return number;
}

std::shared_ptr<gloo::Context> connect(gloo::rendezvous::Store &store, int rank, int ranks) {
    gloo::transport::tcp::attr where("127.0.0.1");
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(where);
    context->connectFullMesh(store, device);
    return context;
}

std::unique_ptr<gloo::Algorithm> algorithm_of(const std::string &name, std::vector<float> &values) {
    const std::vector<float *> pointers{values.data()};
    const int count = static_cast<int>(values.size());
    if (name == "ring") {
        return std::make_unique<gloo::AllreduceRing<float>>(everybody, pointers, count);
    }
    if (name == "chunked") {
        return std::make_unique<gloo::AllreduceRingChunked<float>>(everybody, pointers, count);
    }
    if (name == "halving") {
        return std::make_unique<gloo::AllreduceHalvingDoubling<float>>(everybody, pointers, count);
    }
    if (name == "bcube") {
        return std::make_unique<gloo::AllreduceBcube<float>>(everybody, pointers, count);
    }
    if (name == "barrier-all") {
        return std::make_unique<gloo::BarrierAllToAll>(everybody);
    }
    if (name == "barrier-one") {
        return std::make_unique<gloo::BarrierAllToOne>(everybody);
    }
    fail("no such algorithm");
    return nullptr;
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 8) {
        fail("usage: gloo_reduce sleep|look BYTES MILLISECONDS DIRECTORY ALGORITHM RANK RANKS");
    }
    const bool looks = std::string(arguments[1]) == "look";
    const int rank = std::stoi(arguments[6]), ranks = std::stoi(arguments[7]);
    std::vector<float> values(std::stoul(arguments[2]) / sizeof(float));
    gloo::rendezvous::FileStore store(arguments[4]);
    gloo::rendezvous::PrefixStore first("first", store), second("second", store);
    everybody = connect(first, rank, ranks);
    // Pairs that look are for one kind of message only.
    others = connect(second, rank, ranks);
    for (int peer = 0; looks && peer < ranks; peer++) {
        if (peer != rank) {
            everybody->getPair(peer)->setSync(true, true);
        }
    }
    algorithm = algorithm_of(arguments[5], values);
    time_together(reduce, first_says, rank == 0, std::stod(arguments[3]) / 1e3);
    // The others wait until the driver ends them: a connection that one of them closes would fail the last operation of the rest.
    while (rank != 0) {
        pause();
    }
    fflush(stdout);
    _exit(0);
}
