//! DLPack tensors of other libraries as memory, and buffers as DLPack tensors.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use dlpark::{
    DlpackFlags, Managed, ManagedTensorBase,
    ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned},
    metadata::Dynamic,
};
use tensorwire_memory::{Buf, DlpackMemory, ForeignMemory, Pool, PoolConfig, UserMemory};

/// The elements of another library, which remember their end.
struct Elements {
    values: Vec<u16>,
    is_dropped: Arc<AtomicBool>,
}

impl Drop for Elements {
    fn drop(&mut self) {
        self.is_dropped.store(true, Ordering::Relaxed);
    }
}

/// Of twelve 16-bit numbers, with the address of the first, and whether its deleter was called.
struct Foreign<M: ManagedTensorBase> {
    memory: DlpackMemory<M>,
    first: *const u16,
    is_dropped: Arc<AtomicBool>,
}

fn foreign<M: ManagedTensorBase>(
    shape: &[i64],
    strides: &[i64],
    device: DLDevice,
    offset: u64,
) -> Foreign<M> {
    let is_dropped = Arc::new(AtomicBool::new(false));
    let elements = Elements { values: (0..12).collect(), is_dropped: is_dropped.clone() };
    let first = elements.values.as_ptr();
    let metadata = Dynamic::new(shape, strides).prepare_as::<M>().unwrap();
    let mut tensor = metadata.initialize(Box::new(elements));
    tensor
        .set_data(first.cast_mut().cast())
        .set_dtype(DLDataType::U16)
        .set_device(device)
        .set_byte_offset(offset);
    // SAFETY: the context owns the elements, and no test describes more than there are, or writes them.
    let memory = unsafe { DlpackMemory::new(tensor.finish()) };
    Foreign { memory, first, is_dropped }
}

fn is_used_where_it_is<M: ManagedTensorBase + 'static>() {
    let Foreign { memory, first, is_dropped } = foreign::<M>(&[2, 5], &[5, 1], DLDevice::CPU, 4);
    let user = UserMemory::new();
    let buf = user.buffer_of(Arc::new(memory)).unwrap();
    assert_eq!((buf.as_ptr(), buf.len()), (first.wrapping_add(2).cast(), 20));
    assert_eq!(&buf[..4], [2, 0, 3, 0]);
    let part = buf.slice(4..20).unwrap();
    drop((user, buf));
    assert!(!is_dropped.load(Ordering::Relaxed));
    assert_eq!(&part[..2], [4, 0]);
    drop(part);
    assert!(is_dropped.load(Ordering::Relaxed));
}

#[test]
fn a_dlpack_tensor_is_used_where_it_is_until_the_last_buffer_of_it_is_dropped() {
    is_used_where_it_is::<DLManagedTensor>();
    is_used_where_it_is::<DLManagedTensorVersioned>();
}

#[test]
fn a_dlpack_tensor_has_bytes_if_it_is_on_the_cpu_and_row_major() {
    let row_major: [(&[i64], &[i64]); 6] = [
        (&[3, 4], &[4, 1]),
        (&[3, 1, 4], &[4, 77, 1]),
        (&[1, 4], &[1, 1]),
        (&[0, 4], &[7, 9]),
        (&[], &[]),
        (&[1], &[-5]),
    ];
    for (shape, strides) in row_major {
        let memory = foreign::<DLManagedTensorVersioned>(shape, strides, DLDevice::CPU, 0).memory;
        let length = 2 * shape.iter().product::<i64>() as usize;
        assert!(memory.is_row_major(), "{shape:?} {strides:?}");
        assert_eq!(memory.length(), length, "{shape:?} {strides:?}");
    }
    for strides in [[1, 3], [3, 1], [0, 1], [-4, 1], [4, -1], [6, 2]] {
        let memory = foreign::<DLManagedTensor>(&[2, 4], &strides, DLDevice::CPU, 0).memory;
        assert_eq!((memory.is_row_major(), memory.length()), (false, 0), "{strides:?}");
    }
    let elsewhere = foreign::<DLManagedTensor>(&[2, 4], &[4, 1], DLDevice::cuda(0), 0);
    assert!(elsewhere.memory.is_row_major());
    assert_eq!(elsewhere.memory.length(), 0);
    drop(elsewhere.memory);
    assert!(elsewhere.is_dropped.load(Ordering::Relaxed));
    let negative = foreign::<DLManagedTensor>(&[-2, 4], &[4, 1], DLDevice::CPU, 0).memory;
    assert_eq!((negative.is_row_major(), negative.length()), (false, 0));
}

fn buffer(pool: &Pool) -> Buf {
    let mut buffer = pool.try_alloc(12).unwrap();
    buffer.iter_mut().zip(0..).for_each(|(byte, number)| *byte = number);
    buffer.freeze()
}

fn exported<M: ManagedTensorBase>(pool: &Pool, dtype: DLDataType, shape: &[u64]) -> Option<Managed<M>> {
    DlpackMemory::of_buffer(buffer(pool), dtype, shape).map(DlpackMemory::into_tensor)
}

fn is_exported_without_a_copy<M: ManagedTensorBase>(flags: DlpackFlags) {
    let pool = Pool::new(PoolConfig::new("source")).unwrap();
    let bytes = buffer(&pool);
    let first = bytes.as_ptr();
    let tensor = DlpackMemory::<M>::of_buffer(bytes, DLDataType::F32, &[3, 1]).unwrap().into_tensor();
    let described = tensor.validate_export().unwrap();
    assert_eq!((described.shape(), described.strides()), (&[3, 1][..], Some(&[1, 1][..])));
    assert_eq!((described.data_ptr().cast(), described.byte_offset()), (first, 0));
    assert!(described.dtype().matches(DLDataType::F32));
    assert_eq!((described.device().device_type, tensor.flags()), (DLDevice::CPU.device_type, flags));
    // SAFETY: the bytes are those of the buffer above.
    assert_eq!(unsafe { described.cpu_bytes() }.unwrap(), (0..12).collect::<Vec<u8>>());
    // The consumer may end it on any thread.
    assert!(pool.stats().used_bytes > 0);
    std::thread::scope(|scope| scope.spawn(move || drop(tensor)).join().unwrap());
    assert_eq!(pool.stats().used_bytes, 0);
}

#[test]
fn a_buffer_is_exported_without_a_copy_and_freed_by_the_deleter() {
    is_exported_without_a_copy::<DLManagedTensorVersioned>(DlpackFlags::READ_ONLY);
    is_exported_without_a_copy::<DLManagedTensor>(DlpackFlags::empty());
}

#[test]
fn a_shape_that_the_buffer_does_not_have_is_not_exported() {
    let pool = Pool::new(PoolConfig::new("source")).unwrap();
    let fits = |dtype, shape: &[u64]| exported::<DLManagedTensorVersioned>(&pool, dtype, shape).is_some();
    assert!(fits(DLDataType::U8, &[12]) && fits(DLDataType::F32, &[3]) && fits(DLDataType::F4E2M1FN, &[24]));
    assert!(!fits(DLDataType::U8, &[11]) && !fits(DLDataType::U8, &[2, 12]) && !fits(DLDataType::U8, &[0]));
    assert!(!fits(DLDataType::U8, &[u64::MAX, u64::MAX]));
    assert_eq!(pool.stats().used_bytes, 0);
    let empty = DlpackMemory::<DLManagedTensor>::of_buffer(Buf::empty(), DLDataType::F64, &[0, 3]).unwrap();
    assert_eq!(empty.length(), 0);
    assert!(empty.into_tensor().validate_export().unwrap().data_ptr().is_null());
}
