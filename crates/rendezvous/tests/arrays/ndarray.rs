//! Arrays of the crate `ndarray`.

use half::{bf16, f16};
use ndarray::{Array, Array1, Array2, Array3, ArrayD, Axis, Slice, arr0, array};

use super::{arrives, problem};
use tensorwire_memory::{Buf, Pool, PoolConfig, UserMemory};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Element, Tensor};

fn pool() -> Pool {
    Pool::new(PoolConfig { block_bytes: 65_536, ..PoolConfig::new("test") }).unwrap()
}

fn goes_through<T: Element + PartialEq>(values: [T; 4]) {
    let array = Array2::from_shape_vec((2, 2), values.to_vec()).unwrap();
    let (first, copy) = (array.as_ptr(), array.clone().into_dyn());
    let tensor = Tensor::from_array(&UserMemory::new(), array).unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (T::DTYPE, &[2, 2][..]));
    let back = tensor.as_array::<T>().unwrap();
    assert_eq!((back.as_ptr(), &back), (first, &copy.view()));
    let of_pool = Tensor::copy_of_array(&pool(), &back.t()).unwrap();
    assert_eq!(of_pool.as_array::<T>().unwrap(), copy.t());
}

#[test]
fn arrays_of_every_type_become_tensors_and_back_at_one_address() {
    goes_through([1.5f32, f32::MIN, 0.0, 3.0]);
    goes_through([1.5f64, f64::MAX, 2.0, 3.0]);
    goes_through([1.5, 2.0, 4.0, 8.0].map(f16::from_f32));
    goes_through([1.5, 2.0, 4.0, 8.0].map(bf16::from_f32));
    goes_through([true, false, false, true]);
    goes_through([[1.0f32, -1.0], [0.5, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    goes_through([[1.0f64, -1.0], [0.5, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    goes_through([i8::MIN, 1, 2, 3]);
    goes_through([i16::MIN, 1, 2, 3]);
    goes_through([i32::MIN, 1, 2, 3]);
    goes_through([i64::MIN, 1, 2, 3]);
    goes_through([1u8, 2, 3, 4]);
    goes_through([u16::MAX, 1, 2, 3]);
    goes_through([u32::MAX, 1, 2, 3]);
    goes_through([u64::MAX, 1, 2, 3]);
}

#[test]
fn an_array_of_no_dimension_and_one_without_elements_go_through() {
    let scalar = Tensor::from_array(&UserMemory::new(), arr0(7i32)).unwrap();
    assert_eq!((scalar.shape(), scalar.as_array::<i32>().unwrap()), (&[][..], arr0(7).into_dyn().view()));
    let none = Tensor::from_array(&UserMemory::new(), Array3::<f32>::zeros((2, 0, 3))).unwrap();
    assert_eq!((none.shape(), none.as_array::<f32>().unwrap().shape()), (&[2, 0, 3][..], &[2, 0, 3][..]));
    let none = Tensor::copy_of_array(&pool(), &Array1::<f32>::zeros(0)).unwrap();
    assert_eq!(none.as_array::<f32>().unwrap().len(), 0);
}

#[test]
fn whole_rows_of_an_array_are_a_part_of_its_vector() {
    let mut array = Array2::from_shape_fn((6, 5), |(row, column)| (10 * row + column) as u32);
    array.slice_axis_inplace(Axis(0), Slice::from(2..5));
    let (first, copy) = (array.as_ptr(), array.clone().into_dyn());
    let tensor = Tensor::from_array(&UserMemory::new(), array).unwrap();
    assert_eq!((tensor.shape(), tensor.bytes().as_ptr()), (&[3, 5][..], first.cast()));
    assert_eq!(tensor.as_array::<u32>().unwrap(), copy);
}

#[test]
fn another_order_is_refused_with_the_remedies_which_work() {
    let matrix = array![[1i32, 2, 3], [4, 5, 6]];
    let mut columns = matrix.clone();
    columns.slice_axis_inplace(Axis(1), Slice::from(0..2));
    let mut backwards = matrix.clone();
    backwards.invert_axis(Axis(1));
    let mut other_rows = matrix.clone();
    other_rows.invert_axis(Axis(0));
    for array in [matrix.reversed_axes(), columns, backwards, other_rows] {
        let refused = problem(Tensor::from_array(&UserMemory::new(), array.clone()));
        assert!(refused.contains(&format!("strides {:?}", array.strides())), "{refused}");
        assert!(refused.contains("copy_of_array") && refused.contains("as_standard_layout()"), "{refused}");
        let copied = Tensor::copy_of_array(&pool(), &array).unwrap();
        assert_eq!(copied.as_array::<i32>().unwrap(), array.view().into_dyn());
        let standard = array.as_standard_layout().into_owned();
        let joined = Tensor::from_array(&UserMemory::new(), standard).unwrap();
        assert_eq!(joined.bytes(), copied.bytes());
    }
}

#[test]
fn what_cannot_be_an_array_where_it_is_is_refused_with_the_remedy() {
    let tensor = Tensor::from_values(&pool(), &[9], &[0u8; 9]).unwrap();
    assert_eq!(problem(tensor.as_array::<f32>()), "its element type is u8, not f32; use the type it has");
    let odd = Tensor::shared(tensor.buf().slice(1..9).unwrap(), DataType::F32, &[2]).unwrap();
    assert!(problem(odd.as_array::<f32>()).contains("values()"));
    let dead = Tensor::dead(DataType::F32, &[2]).unwrap();
    assert!(problem(dead.as_array::<f32>()).contains("is_dead()"));
    let wide = Tensor::shared(Buf::empty(), DataType::F32, &[0, 1 << 40, 1 << 40]).unwrap();
    assert!(problem(wide.as_array::<f32>()).contains("too large for ndarray"));
}

#[test]
fn the_vector_of_an_array_lives_as_long_as_tensors_of_it() {
    let memory = UserMemory::new();
    let tensor = Tensor::from_array(&memory, Array::from_vec(vec![1u16, 2, 3])).unwrap();
    let clone = tensor.clone();
    drop((memory, tensor));
    assert_eq!(clone.as_array::<u16>().unwrap(), array![1, 2, 3].into_dyn());
}

#[test]
fn an_array_and_rows_of_one_arrive() {
    let array = ArrayD::from_shape_fn(vec![20, 30, 40], |at| (at[0] * 7 + at[1] * 3 + at[2]) as f64);
    arrives(|worker| Tensor::from_array(worker.user_memory(), array.clone()).unwrap());
    arrives(|worker| {
        let mut rows = array.clone();
        rows.slice_axis_inplace(Axis(0), Slice::from(1..19));
        Tensor::from_array(worker.user_memory(), rows).unwrap()
    });
}
