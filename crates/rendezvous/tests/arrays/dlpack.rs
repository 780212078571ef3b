//! DLPack tensors. The tests of `tensorwire-memory` make those of other libraries, which takes a promise that the compiler cannot check.

use dlpark::{
    DlpackFlags, ManagedTensorBase,
    ffi::{DLDataType, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned},
};

use super::{arrives, problem};
use tensorwire_memory::{Buf, DlpackMemory, Pool, PoolConfig, UserMemory};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::Tensor;

fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: 65_536, ..PoolConfig::new("test") }).unwrap()
}

fn imported<M: ManagedTensorBase + 'static>(bytes: Buf, dtype: DLDataType, shape: &[u64]) -> Tensor {
    let foreign = DlpackMemory::<M>::of_buffer(bytes, dtype, shape).unwrap();
    Tensor::from_dlpack(&UserMemory::new(), foreign).unwrap()
}

#[test]
fn tensors_of_every_plain_type_become_dlpack_tensors_and_back_at_one_address() {
    let pool = pool();
    for &dtype in DataType::ALL.iter().filter(|dtype| dtype.is_plain()) {
        let bytes = vec![1; 6 * dtype.bits() as usize / 8];
        let tensor = Tensor::from_bytes(&pool, dtype, &[2, 3], &bytes).unwrap();
        let first = tensor.bytes().as_ptr();

        let (exported, unversioned) = (tensor.to_dlpack().unwrap(), tensor.to_unversioned_dlpack().unwrap());
        for described in [exported.validate_export().unwrap(), unversioned.validate_export().unwrap()] {
            assert_eq!((described.data_ptr().cast(), described.byte_offset()), (first, 0), "{dtype}");
            assert_eq!((described.shape(), described.strides()), (&[2, 3][..], Some(&[3, 1][..])));
            assert_eq!(described.device().device_type, DLDeviceType::CPU);
            assert_eq!((u64::from(described.dtype().bits), described.dtype().lanes), (dtype.bits(), 1));
        }
        assert_eq!((exported.flags(), unversioned.flags()), (DlpackFlags::READ_ONLY, DlpackFlags::empty()));
        assert_eq!(exported.version().major, 1);

        let described = exported.validate().unwrap().dtype();
        let back = [
            imported::<DLManagedTensorVersioned>(tensor.buf().clone(), described, &[2, 3]),
            imported::<DLManagedTensor>(tensor.buf().clone(), described, &[2, 3]),
        ];
        for back in back {
            assert_eq!((back.metadata(), back.bytes().as_ptr()), (tensor.metadata(), first));
        }
    }
}

#[test]
fn an_exported_tensor_holds_its_memory_until_its_deleter_is_called() {
    let pool = pool();
    let exported = Tensor::from_values(&pool, &[2], &[1.0f32, 2.0]).unwrap().to_dlpack().unwrap();
    assert!(pool.stats().used_bytes > 0);
    drop(exported);
    assert_eq!(pool.stats().used_bytes, 0);
}

#[test]
fn an_imported_tensor_is_released_with_its_last_clone() {
    let pool = pool();
    let bytes = Tensor::from_values(&pool, &[2], &[1.0f32, 2.0]).unwrap().buf().clone();
    let tensor = imported::<DLManagedTensor>(bytes, DLDataType::F32, &[2]);
    let clone = tensor.clone();
    drop(tensor);
    assert_eq!(clone.as_slice::<f32>().unwrap(), [1.0, 2.0]);
    assert!(pool.stats().used_bytes > 0);
    drop(clone);
    assert_eq!(pool.stats().used_bytes, 0);
}

#[test]
fn a_scalar_and_a_tensor_without_elements_go_through() {
    let scalar = Tensor::from_values(&pool(), &[], &[7u8]).unwrap();
    assert_eq!(scalar.to_dlpack().unwrap().validate_export().unwrap().shape(), [0; 0]);
    let none = Tensor::from_values(&pool(), &[0, 3], &[0.0f32; 0]).unwrap();
    assert_eq!(none.to_dlpack().unwrap().validate_export().unwrap().shape(), [0, 3]);
    let none = imported::<DLManagedTensorVersioned>(Buf::empty(), DLDataType::F32, &[0, 3]);
    assert_eq!((none.shape(), none.bytes().len()), (&[0, 3][..], 0));
}

#[test]
fn what_the_other_side_lacks_is_refused_with_the_remedy() {
    let pool = pool();
    let strings = Tensor::from_strings(&pool, &[1], &["a"]).unwrap();
    assert!(problem(strings.to_dlpack().map(drop)).contains("no element type string"));
    let dead = Tensor::dead(DataType::F32, &[2]).unwrap();
    assert!(problem(dead.to_unversioned_dlpack().map(drop)).contains("is_dead()"));
    let bytes = pool.try_alloc(2).unwrap().freeze();
    let foreign = DlpackMemory::<DLManagedTensor>::of_buffer(bytes, DLDataType::F4E2M1FN, &[4]).unwrap();
    let refused = problem(Tensor::from_dlpack(&UserMemory::new(), foreign));
    assert!(refused.contains("code 17, 4 bits, 1 lanes") && refused.contains("uint8"), "{refused}");
    assert_eq!(
        pool.stats().used_bytes,
        strings.buf().len().next_multiple_of(64) as u64,
        "the refused one is released"
    );
}

#[test]
fn a_dlpack_tensor_arrives() {
    arrives(|worker| {
        let values: Vec<f32> = (0..90_000).map(|at| at as f32).collect();
        let bytes = Tensor::from_vec(&UserMemory::new(), &[90_000], values).unwrap().buf().clone();
        let foreign =
            DlpackMemory::<DLManagedTensorVersioned>::of_buffer(bytes, DLDataType::F32, &[300, 300]);
        Tensor::from_dlpack(worker.user_memory(), foreign.unwrap()).unwrap()
    });
}
