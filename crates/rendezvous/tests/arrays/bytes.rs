//! `bytes::Bytes` as tensors, and tensors as `bytes::Bytes`.

use std::{
    fs::{self, File},
    sync::Arc,
    thread,
};

use bytes::Bytes;

use super::{arrives, problem};
use tensorwire_memory::{Mapping, Pool, PoolConfig, UserMemory};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Tensor;

/// The bytes of an owner that is counted.
struct Owner(Vec<u8>, #[expect(dead_code, reason = "counted")] Arc<()>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[test]
fn bytes_become_a_tensor_and_a_tensor_bytes_at_one_address() {
    let (memory, count) = (UserMemory::new(), Arc::new(()));
    let bytes = Bytes::from_owner(Owner((0..41).collect(), count.clone())).slice(1..);
    let first = bytes.as_ptr();
    let tensor = Tensor::from_owned_bytes(&memory, DataType::F64, &[5], bytes).unwrap();
    assert_eq!((tensor.bytes().as_ptr(), tensor.shape()), (first, &[5][..]));
    let clone = tensor.clone();
    let back = Bytes::from(tensor);
    assert_eq!((back.as_ptr(), &back[..]), (first, &(1..41).collect::<Vec<u8>>()[..]));
    drop((memory, clone));
    assert_eq!((back[0], Arc::strong_count(&count)), (1, 2));
    drop(back);
    assert_eq!(Arc::strong_count(&count), 1, "the last of it ends the owner");
}

#[test]
fn bytes_of_a_tensor_in_a_pool_are_the_pools_until_they_are_dropped() {
    let pool = Pool::new(PoolConfig { block_bytes: 65_536, ..PoolConfig::new("test") }).unwrap();
    let tensor = Tensor::from_values(&pool, &[3], &[1u16, 2, 3]).unwrap();
    let first = tensor.bytes().as_ptr();
    let bytes = Bytes::from(tensor);
    assert_eq!((bytes.as_ptr(), &bytes[..]), (first, &[1, 0, 2, 0, 3, 0][..]));
    assert!(pool.stats().used_bytes > 0);
    drop(bytes);
    assert_eq!(pool.stats().used_bytes, 0);
}

#[test]
fn clones_of_one_memory_become_tensors_at_the_same_time() {
    let memory = UserMemory::new();
    let bytes = Bytes::from(vec![7u8; 1000]);
    thread::scope(|scope| {
        for start in 0..8 {
            let (memory, bytes) = (&memory, &bytes);
            scope.spawn(move || {
                for _ in 0..1000 {
                    let part = bytes.slice(start..);
                    let shape = [part.len() as u64];
                    let tensor = Tensor::from_owned_bytes(memory, DataType::U8, &shape, part).unwrap();
                    assert_eq!(tensor.bytes().as_ptr(), bytes[start..].as_ptr());
                }
            });
        }
    });
    assert!(bytes.is_unique());
}

#[test]
fn bytes_that_do_not_fill_the_shape_are_refused_with_the_number_that_does() {
    let bytes = Bytes::from_static(&[0; 7]);
    let refused = Tensor::from_owned_bytes(&UserMemory::new(), DataType::F32, &[2], bytes);
    assert_eq!(problem(refused), "f32 [2] takes 8 bytes, but the buffer has 7; give exactly that many");
}

#[test]
fn bytes_at_an_odd_address_and_a_mapped_file_arrive() {
    arrives(|worker| {
        let bytes = Bytes::from((0..400_001).map(|at| (at % 251) as u8).collect::<Vec<_>>()).slice(1..);
        Tensor::from_owned_bytes(worker.user_memory(), DataType::F32, &[100, 1000], bytes).unwrap()
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    fs::write(&path, (0..100_000).map(|at| (at % 241) as u8).collect::<Vec<_>>()).unwrap();
    arrives(|worker| {
        let mapped = Mapping::of_file(&File::open(&path).unwrap()).unwrap();
        Tensor::from_owned_bytes(worker.user_memory(), DataType::I16, &[50_000], mapped).unwrap()
    });
}
