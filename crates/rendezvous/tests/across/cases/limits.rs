//! The longest and the smallest of everything.

use futures::future::{join, join_all};
use tensorwire_memory::Pool;
use tensorwire_protocol::{Code, DataType, Key, limits::NAME_BYTES_MAX};
use tensorwire_rendezvous::{Tensor, WorkerError};

use super::{Given, Two, number, value_of};

/// Sends and receives each tensor twice, so that its metadata is unknown and known, and compares.
async fn travel(two: &Two, edge: &str, tensors: &[Tensor]) {
    let key = two.key(edge);
    for tensor in tensors.iter().flat_map(|tensor| [tensor, tensor]) {
        two.sender.shared_step(1).send(&key, tensor.clone()).unwrap();
        let received = two.receiver.shared_step(1).recv(&key).await.unwrap();
        assert_eq!((received.metadata(), received.is_dead()), (tensor.metadata(), tensor.is_dead()));
        assert!(received.bytes() == tensor.bytes(), "{edge}");
    }
}

/// A key of exactly `length` bytes.
fn key_of(two: &Two, length: usize) -> Key {
    let shortest = two.key("-").with_incarnation(two.sender.incarnation()).as_str().len();
    two.key(&"-".repeat(1 + length - shortest))
}

pub(crate) async fn s12_03_keys_of_512_513_and_1024_bytes_travel_and_longer_ones_are_refused(ground: Given) {
    let two = Two::new(&ground).await;
    for (length, value) in [(512, 1), (513, 2), (1024, 3)] {
        let key = key_of(&two, length);
        assert_eq!(key.as_str().len(), length);
        for round in 0..2 {
            two.send(&key, value + round);
            assert_eq!(value_of(&two.receiver.shared_step(1).recv(&key).await.unwrap()), value + round);
        }
    }
    assert_eq!(NAME_BYTES_MAX, 1024);
    let over = key_of(&two, 1025);
    let refused = two.receiver.shared_step(1).recv(&over).await.unwrap_err();
    assert!(
        matches!(&refused, WorkerError::Local { .. }) && refused.code() == Code::ResourceExhausted,
        "{refused}"
    );
    assert!(refused.to_string().contains("1025") && refused.to_string().contains("1024"), "{refused}");
    // The connection goes on.
    two.send(&two.key("after"), 4);
    assert_eq!(value_of(&two.receiver.shared_step(1).recv(&two.key("after")).await.unwrap()), 4);
    two.end().await;
}

fn of_rank(pool: &Pool, rank: usize) -> Tensor {
    let mut shape = vec![1; rank];
    if let Some(last) = shape.last_mut() {
        *last = 3;
    }
    let values = if rank == 0 { &[7.0][..] } else { &[1.0, 2.0, 3.0] };
    Tensor::from_values::<f32>(pool, &shape, values).unwrap()
}

pub(crate) async fn s12_03_ranks_0_6_7_and_254_travel(ground: Given) {
    let two = Two::new(&ground).await;
    let tensors = [0, 6, 7, 254].map(|rank| of_rank(two.sender.pool(), rank));
    travel(&two, "ranks", &tensors).await;
    two.end().await;
}

pub(crate) async fn s12_03_dimensions_of_65534_65535_and_2_to_the_32_travel(ground: Given) {
    let two = Two::new(&ground).await;
    let bytes = |length: u64| {
        let values: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        Tensor::from_values(two.sender.pool(), &[length], &values).unwrap()
    };
    let huge = |shape: &[u64]| Tensor::from_values::<u8>(two.sender.pool(), shape, &[]).unwrap();
    let tensors =
        [bytes(65_534), bytes(65_535), bytes(65_536), huge(&[1 << 32, 0]), huge(&[2, 65_535, 3, 4, 0])];
    travel(&two, "dimensions", &tensors).await;
    two.end().await;
}

pub(crate) async fn s12_03_nothing_and_dead_values_travel(ground: Given) {
    let two = Two::new(&ground).await;
    let live = Tensor::from_values(two.sender.pool(), &[2], &[1.0f32, 2.0]).unwrap();
    let empty = Tensor::from_values::<f32>(two.sender.pool(), &[0, 5], &[]).unwrap();
    let dead = Tensor::dead(DataType::F32, &[]).unwrap();
    travel(&two, "values", &[live.clone(), dead.clone(), empty.clone(), live, empty, dead]).await;
    two.end().await;
}

pub(crate) async fn s12_03_proto_values_change_their_size(ground: Given) {
    let two = Two::new(&ground).await;
    let key = two.key("strings");
    for length in [0, 5, 5, 6, 20_000, 5] {
        let strings = ["x".repeat(length), "end".to_owned()];
        let tensor = Tensor::from_strings(two.sender.pool(), &[2], &strings).unwrap();
        two.sender.shared_step(1).send(&key, tensor).unwrap();
        let received = two.receiver.shared_step(1).recv(&key).await.unwrap();
        assert_eq!(received.strings().unwrap(), strings.map(String::into_bytes));
    }
    two.end().await;
}

pub(crate) async fn s12_03_ten_thousand_outstanding_receives(ground: Given) {
    const MANY: u64 = 10_000;
    let two = Two::with(&ground, |builder| builder.flow(|flow| flow.requests_max = MANY as u32)).await;
    let keys: Vec<Key> = (0..MANY).map(|edge| two.key(&format!("{edge}"))).collect();
    let step = two.receiver.shared_step(1);
    let send = async {
        // All of them, or nearly, wait at the sender: each is as long as its key at least.
        let shortest = MANY * keys[0].as_str().len() as u64;
        super::until(&ground, || Two::peer_counters(&two.sender).message_bytes_received >= shortest).await;
        let step = two.sender.shared_step(1);
        for (value, key) in keys.iter().enumerate().rev() {
            step.send(key, number(&two.sender, value as u64)).unwrap();
        }
    };
    let (received, ()) = join(join_all(keys.iter().map(|key| step.recv(key).into_future())), send).await;
    for (value, received) in received.into_iter().enumerate() {
        assert_eq!(value_of(&received.unwrap()), value as u64);
    }
    two.end().await;
}
