//! Values between the devices of one process: shared where both devices have one kind of memory, else copied.

use futures::{FutureExt, poll};
use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{
    AllocatorAttributes, CancellationToken, Delivered, IntraProcessRendezvous, RecvArgs, SendArgs, Tensor,
};

use crate::family::{
    device::{Masked, Way},
    support::{CPU, GPU, key_between, number, pool, read, run, text},
};

const SECOND_GPU: &str = "/job:mnist/replica:1/task:2/device:GPU:1";

const NONE: AllocatorAttributes =
    AllocatorAttributes { on_host: false, gpu_compatible: false, nic_compatible: false };
const PINNED: AllocatorAttributes = AllocatorAttributes { gpu_compatible: true, ..NONE };
const ON_HOST: AllocatorAttributes = AllocatorAttributes { on_host: true, ..NONE };

fn value() -> Tensor {
    Tensor::from_values(&pool(), &[4], &[1u8, 2, 3, 4]).unwrap()
}

/// Sends and receives at once.
fn transfer(
    ends: (&str, &str),
    tensor: &Tensor,
    send: SendArgs,
    recv: RecvArgs,
) -> Result<Delivered, Status> {
    let (rendezvous, key) = (IntraProcessRendezvous::new(), key_between(ends.0, ends.1, "edge"));
    rendezvous.send(&key, send, tensor.clone()).unwrap();
    rendezvous.recv(&key, recv).now_or_never().unwrap()
}

fn is_shared(one: &Tensor, other: &Tensor) -> bool {
    one.bytes().as_ptr() == other.bytes().as_ptr()
}

#[test]
fn s2_7_two_ends_on_the_host_share_the_buffer() {
    let (sent, device) = (value(), Masked::new(0xFF));
    for ends in [(CPU, CPU), (CPU, GPU), (GPU, CPU), (GPU, GPU)] {
        let got = transfer(ends, &sent, SendArgs::default(), RecvArgs::default()).unwrap();
        assert!(is_shared(&got.tensor, &sent));
        // Also where the device is another, but the memory isn't.
        let send = SendArgs { attributes: ON_HOST, ..device.from() };
        let recv = RecvArgs { attributes: ON_HOST, ..device.to() };
        assert!(is_shared(&transfer(ends, &sent, send, recv).unwrap().tensor, &sent));
    }
    let strings = text("shared as well");
    let got = transfer((CPU, CPU), &strings, device.from(), device.to()).unwrap();
    assert!(is_shared(&got.tensor, &strings) && device.copies().is_empty());
}

#[test]
fn s2_7_from_the_host_to_a_device_the_receivers_context_copies() {
    let (sent, device) = (value(), Masked::new(0x55));
    let send = SendArgs { attributes: PINNED, ..SendArgs::default() };
    let wanted = AllocatorAttributes { nic_compatible: true, ..NONE };
    let got = transfer((CPU, GPU), &sent, send, RecvArgs { attributes: wanted, ..device.to() }).unwrap();
    assert_eq!(got.tensor.bytes(), device.masked(sent.bytes()));
    // The receiver's attributes, and pinned because the sender's were.
    let attributes = AllocatorAttributes { gpu_compatible: true, nic_compatible: true, on_host: false };
    assert_eq!(device.copies(), [(Way::ToDevice, attributes)]);
    // The arguments of each side are unchanged.
    assert_eq!((got.send_args.attributes, got.recv_args.attributes), (PINNED, wanted));
}

#[test]
fn s2_7_from_a_device_to_the_host_the_senders_context_copies() {
    let (plain, device) = (value(), Masked::new(0x55));
    let sent = device.convert(&plain);
    for (recv, attributes) in
        [(RecvArgs::default(), NONE), (RecvArgs { attributes: PINNED, ..RecvArgs::default() }, PINNED)]
    {
        device.copies.lock().unwrap().clear();
        let got = transfer((GPU, CPU), &sent, device.from(), recv).unwrap();
        assert_eq!(got.tensor.bytes(), plain.bytes());
        assert_eq!(device.copies(), [(Way::ToHost, attributes)]);
    }
    // A receiver on the device that wants it on the host.
    let recv = RecvArgs { attributes: ON_HOST, ..device.to() };
    assert_eq!(transfer((GPU, GPU), &sent, device.from(), recv).unwrap().tensor.bytes(), plain.bytes());
}

#[test]
fn s2_7_from_device_to_device_both_contexts_copy() {
    let (plain, one, other) = (value(), Masked::new(0x55), Masked::new(0x0F));
    let got = transfer((GPU, SECOND_GPU), &one.convert(&plain), one.from(), other.to()).unwrap();
    assert_eq!(got.tensor.bytes(), other.masked(plain.bytes()));
    let on_the_way = AllocatorAttributes { on_host: true, gpu_compatible: true, nic_compatible: false };
    assert_eq!(
        (one.copies(), other.copies()),
        (vec![(Way::ToHost, on_the_way)], vec![(Way::ToDevice, NONE)])
    );
}

#[test]
fn s2_8_one_device_shares() {
    let device = Masked::new(0x55);
    let sent = device.convert(&value());
    let got = transfer((GPU, GPU), &sent, device.from(), device.to()).unwrap();
    assert!(is_shared(&got.tensor, &sent) && device.copies().is_empty());
}

#[test]
fn s2_7_elements_that_are_no_plain_bytes_stay_on_the_host() {
    let (rendezvous, device) = (IntraProcessRendezvous::new(), Masked::new(0x55));
    let key = key_between(CPU, GPU, "words");
    rendezvous.send(&key, SendArgs::default(), text("word")).unwrap();
    let refused = rendezvous.recv(&key, device.to()).now_or_never().unwrap().unwrap_err();
    assert_eq!(refused.code, Code::InvalidArgument);
    assert!(refused.message.contains("string") && refused.message.contains("on_host"), "{refused}");
    let recv = RecvArgs { attributes: ON_HOST, ..device.to() };
    let got = rendezvous.recv(&key, recv).now_or_never().unwrap().unwrap();
    assert_eq!(read(&got.tensor), "word");
}

#[test]
fn s2_7_what_a_context_fails_with_is_told_and_the_value_stays() {
    let (rendezvous, device) = (IntraProcessRendezvous::new(), Masked::new(0x55));
    let key = key_between(CPU, GPU, "edge");
    rendezvous.send(&key, SendArgs::default(), value()).unwrap();
    for (outcome, code) in [
        (Err((Code::ResourceExhausted, "no device memory")), Code::ResourceExhausted),
        (Ok(number(1)), Code::Internal),
    ] {
        device.break_with(outcome);
        let failed = rendezvous.recv(&key, device.to()).now_or_never().unwrap().unwrap_err();
        assert_eq!(failed.code, code, "{failed}");
    }
    *device.broken.lock().unwrap() = None;
    let got = rendezvous.recv(&key, device.to()).now_or_never().unwrap().unwrap();
    assert_eq!(got.tensor.bytes(), device.masked(value().bytes()));
}

#[test]
fn s2_7_a_receive_dropped_while_its_value_is_copied_loses_nothing() {
    run(async {
        let (rendezvous, device) = (IntraProcessRendezvous::new(), Masked::stopped(0x55));
        let key = key_between(CPU, GPU, "edge");
        let mut first = Box::pin(rendezvous.recv(&key, device.to()));
        let mut second = Box::pin(rendezvous.recv(&key, RecvArgs::default()));
        rendezvous.send(&key, SendArgs::default(), value()).unwrap();
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        drop(first);
        assert_eq!(second.await.unwrap().tensor.bytes(), value().bytes());
    });
}

#[test]
fn s2_8_an_abort_ends_waiting_receives_and_not_copies_under_way() {
    run(async {
        let (rendezvous, device) = (IntraProcessRendezvous::new(), Masked::stopped(0x55));
        let key = key_between(CPU, GPU, "edge");
        let token = CancellationToken::new();
        let args = RecvArgs { cancellation: Some(token.clone()), ..device.to() };
        let (mut copied, waiting) =
            (Box::pin(rendezvous.recv(&key, args)), rendezvous.recv(&key, device.to()));
        rendezvous.send(&key, SendArgs::default(), value()).unwrap();
        assert!(poll!(&mut copied).is_pending());
        token.cancel();
        rendezvous.abort(&Status::new(Code::Aborted, "forwarded"));
        assert_eq!(waiting.await.unwrap_err().message, "forwarded");
        assert!(poll!(&mut copied).is_pending());
        device.permits.add_permits(1);
        assert_eq!(copied.await.unwrap().tensor.bytes(), device.masked(value().bytes()));
        assert_eq!(rendezvous.aborted().unwrap().message, "forwarded");
        let refused = rendezvous.send(&key, SendArgs::default(), value()).unwrap_err();
        assert_eq!(refused.message, "forwarded");
    });
}
