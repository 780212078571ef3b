//! Who holds the device contexts of sender and receiver, and for how long.

use std::{any::Any, sync::Arc};

use futures::{FutureExt, poll};
use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{
    AllocatorAttributes, DeviceContext, DuplicatePolicy, IntraProcessRendezvous, LocalConfig,
    LocalRendezvous, RecvArgs, SendArgs,
};

use crate::family::{
    device::Stream,
    support::{key, number, run},
};

fn from(stream: &Arc<Stream>) -> SendArgs {
    SendArgs { device_context: Some(stream.clone()), ..SendArgs::default() }
}

fn to(stream: &Arc<Stream>) -> RecvArgs {
    RecvArgs { device_context: Some(stream.clone()), ..RecvArgs::default() }
}

fn stream_of(context: Option<&Arc<dyn DeviceContext>>) -> u32 {
    let context: &dyn Any = &**context.unwrap();
    context.downcast_ref::<Stream>().unwrap().0
}

#[test]
fn s2_9_14_transfer_dummy_device_context() {
    let rendezvous = LocalRendezvous::new();
    let pinned = AllocatorAttributes { gpu_compatible: true, ..AllocatorAttributes::default() };
    let args = SendArgs { attributes: pinned, ..from(&Stream::new(123)) };
    rendezvous.send(&key("foo"), args, number(1)).unwrap();
    let got = rendezvous.recv(&key("foo"), to(&Stream::new(1))).now_or_never().unwrap().unwrap();
    assert_eq!(stream_of(got.send_args.device_context.as_ref()), 123);
    assert_eq!(stream_of(got.recv_args.device_context.as_ref()), 1);
    assert_eq!(got.send_args.attributes, pinned);
}

#[test]
fn s2_6_the_table_holds_the_senders_context_while_the_value_waits() {
    let (rendezvous, stream) = (LocalRendezvous::new(), Stream::new(1));
    rendezvous.send(&key("foo"), from(&stream), number(1)).unwrap();
    assert_eq!(Arc::strong_count(&stream), 2);
    let got = rendezvous.recv(&key("foo"), RecvArgs::default()).now_or_never().unwrap().unwrap();
    assert!(Arc::ptr_eq(got.send_args.device_context.as_ref().unwrap(), &(stream.clone() as _)));
    drop(got);
    assert_eq!(Arc::strong_count(&stream), 1);
    rendezvous.send(&key("foo"), from(&stream), number(1)).unwrap();
    rendezvous.abort(&Status::new(Code::Aborted, "dropped with the value"));
    assert_eq!(Arc::strong_count(&stream), 1);
}

#[test]
fn s2_6_a_receive_holds_its_context_while_it_waits() {
    run(async {
        let (rendezvous, stream) = (IntraProcessRendezvous::new(), Stream::new(1));
        let mut waiting = Box::pin(rendezvous.recv(&key("foo"), to(&stream)));
        assert!(poll!(&mut waiting).is_pending());
        assert_eq!(Arc::strong_count(&stream), 2);
        rendezvous.send(&key("foo"), SendArgs::default(), number(1)).unwrap();
        drop(waiting.await.unwrap());
        assert_eq!(Arc::strong_count(&stream), 1);

        let local = LocalRendezvous::new();
        let (one, other) = (local.recv(&key("foo"), to(&stream)), local.recv(&key("foo"), to(&stream)));
        assert_eq!(Arc::strong_count(&stream), 3);
        drop(one);
        assert_eq!(Arc::strong_count(&stream), 2);
        local.abort(&Status::new(Code::Aborted, "over"));
        assert_eq!(other.await.unwrap_err().message, "over");
        assert_eq!(Arc::strong_count(&stream), 1);
    });
}

#[test]
fn s2_6_a_value_that_is_received_again_shows_the_same_context_each_time() {
    let config = LocalConfig { duplicates: DuplicatePolicy::Tolerate, ..LocalConfig::default() };
    let (rendezvous, stream) = (LocalRendezvous::with_config(config), Stream::new(9));
    rendezvous.send(&key("foo"), from(&stream), number(1)).unwrap();
    for _ in 0..3 {
        let got = rendezvous.recv(&key("foo"), RecvArgs::default()).now_or_never().unwrap().unwrap();
        assert_eq!(stream_of(got.send_args.device_context.as_ref()), 9);
    }
    drop(rendezvous);
    assert_eq!(Arc::strong_count(&stream), 1);
}

#[test]
fn s2_6_receives_end_with_the_last_handle_of_their_rendezvous() {
    let rendezvous = LocalRendezvous::new();
    let (clone, waiting) = (rendezvous.clone(), rendezvous.recv(&key("foo"), RecvArgs::default()));
    drop(rendezvous);
    clone.send(&key("bar"), SendArgs::default(), number(1)).unwrap();
    drop(clone);
    let ended = waiting.now_or_never().unwrap().unwrap_err();
    assert_eq!(ended.code, Code::Cancelled);
    assert!(ended.message.ends_with("deleted") && ended.is_derived(), "{ended}");
}
