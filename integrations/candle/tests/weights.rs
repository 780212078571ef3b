//! Weights of models, between a trainer and services over each fabric.

use std::error::Error;

use candle_core::{DType, Device, IndexOp as _, Storage, Tensor, Var};
use candle_nn::{Init, Module as _, VarBuilder, VarMap, linear};
use half::{bf16, f16};
use tensorwire::{FabricKind, Peer, Worker, sets::Policy};
use tensorwire_candle::{
    Error as CandleError, Variables, from_candle, named_tensors, to_candle, var_builder,
};

type Outcome = Result<(), Box<dyn Error>>;

const FABRICS: [FabricKind; 2] = [FabricKind::SHM, FabricKind::TCP];

/// A trainer, and a service that reaches it over this fabric only.
async fn pair(fabric: FabricKind) -> Result<(Worker, Worker, Peer), Box<dyn Error>> {
    let trainer = Worker::builder("trainer").start().await?;
    let service = Worker::client().require(fabric).start().await?;
    let peer = service.peer_at(trainer.address()).await?;
    Ok((trainer, service, peer))
}

/// Variables of every type that both know, with values that differ.
fn variables() -> candle_core::Result<VarMap> {
    let map = VarMap::new();
    let device = &Device::Cpu;
    let made = [
        ("u8", Var::new(&[1u8, 255], device)?),
        ("u32", Var::new(&[1u32, u32::MAX], device)?),
        ("i16", Var::new(&[-3i16, i16::MAX], device)?),
        ("i32", Var::new(&[-4i32, i32::MAX], device)?),
        ("i64", Var::new(&[-5i64, i64::MIN], device)?),
        ("bf16", Var::new(&[bf16::from_f32(1.5), bf16::MIN], device)?),
        ("f16", Var::new(&[f16::from_f32(-2.5), f16::MAX], device)?),
        ("f32", Var::new(&[[0.1f32, f32::MIN_POSITIVE], [2.0, -0.0]], device)?),
        ("f64", Var::new(&[0.1f64, f64::MAX], device)?),
    ];
    map.data()
        .lock()
        .unwrap_or_else(|error| error.into_inner())
        .extend(made.map(|(name, var)| (name.to_owned(), var)));
    Ok(map)
}

/// The bits of a tensor, as text.
fn shown(tensor: &Tensor) -> String {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return String::new() };
    format!("{storage:?} {:?}", layout.dims())
}

/// The address of a variable's memory.
fn address(variable: &Tensor) -> usize {
    let (storage, _) = variable.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return 0 };
    storage.as_slice::<f32>().map_or(0, |values| values.as_ptr().addr())
}

#[tokio::test]
async fn every_type_of_both_arrives_bit_for_bit_over_each_fabric() -> Outcome {
    for fabric in FABRICS {
        let (trainer, service, peer) = pair(fabric).await?;
        let sent = variables()?;
        trainer.set("weights").commit(1, named_tensors(trainer.pool(), &sent)?).await?;
        let snapshot = peer.set("weights").fetch().await?;
        let builder = var_builder(&snapshot, DType::F32, &Device::Cpu);
        for (name, variable) in &*sent.data().lock().unwrap_or_else(|error| error.into_inner()) {
            let got =
                builder.get_with_hints_dtype(variable.shape(), name, Init::Const(0.0), variable.dtype())?;
            assert_eq!(shown(&got), shown(variable), "{name} over {fabric}");
        }
        service.shutdown().await;
        trainer.shutdown().await;
    }
    Ok(())
}

#[tokio::test]
async fn a_model_answers_with_the_weights_of_its_version_and_follows() -> Outcome {
    for fabric in FABRICS {
        let (trainer, service, peer) = pair(fabric).await?;
        let weights = VarMap::new();
        let taught = linear(3, 2, VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu))?;
        let followed = VarMap::new();
        let model = linear(3, 2, VarBuilder::from_varmap(&followed, DType::F32, &Device::Cpu))?;
        let mut variables = Variables::new(followed.clone());
        let input = Tensor::new(&[[1f32, -2.0, 3.0]], &Device::Cpu)?;
        let mut versions = peer.set("weights").follow(Policy::Every);
        let places: Vec<usize> = followed.all_vars().iter().map(|var| address(var)).collect();
        // A clone of a tensor is shared by versions, so it does not change.
        let mut tensors = named_tensors(trainer.pool(), &weights)?;
        for version in 1..=3 {
            if version > 1 {
                let bias = weights.data().lock().unwrap_or_else(|error| error.into_inner())["bias"].clone();
                bias.set(&bias.affine(1.0, version as f64)?)?;
                for (name, tensor) in &mut tensors {
                    if name == "bias" {
                        *tensor = from_candle(trainer.pool(), &bias)?;
                    }
                }
            }
            trainer.set("weights").commit(version, tensors.clone()).await?;
            let staged = versions.next().await.ok_or("the stream ended")??;
            let copied = variables.apply(&staged.apply())?;
            assert_eq!(copied, if version == 1 { 2 } else { 1 }, "only what changed is copied: {fabric}");
            assert_eq!(variables.version(), Some(version));
            assert_eq!(shown(&model.forward(&input)?), shown(&taught.forward(&input)?), "version {version}");
        }
        let now: Vec<usize> = followed.all_vars().iter().map(|var| address(var)).collect();
        let sorted = |mut all: Vec<usize>| {
            all.sort_unstable();
            all
        };
        assert_eq!(sorted(now), sorted(places), "variables keep their memory");
        service.shutdown().await;
        trainer.shutdown().await;
    }
    Ok(())
}

#[tokio::test]
async fn a_version_that_does_not_fit_changes_nothing_and_names_both() -> Outcome {
    let (trainer, service, peer) = pair(FabricKind::SHM).await?;
    let sent = variables()?;
    let map = VarMap::new();
    map.get((2, 2), "f32", Init::Const(7.0), DType::F32, &Device::Cpu)?;
    map.get(3, "f64", Init::Const(7.0), DType::F64, &Device::Cpu)?;
    trainer.set("weights").commit(1, named_tensors(trainer.pool(), &sent)?).await?;
    let snapshot = peer.set("weights").fetch().await?;
    let mut variables = Variables::new(map.clone());

    let error = variables.apply(&snapshot).expect_err("the shapes of f64 differ");
    assert!(matches!(error, CandleError::Mismatch { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "`f64` is F64 [3] in this model, and F64 [2] in version 1: nothing of this version was copied"
    );
    let kept = map.get((2, 2), "f32", Init::Const(0.0), DType::F32, &Device::Cpu)?;
    assert_eq!(kept.i((0, 0))?.to_scalar::<f32>()?, 7.0);
    assert_eq!(variables.version(), None);

    map.get(1, "absent", Init::Const(0.0), DType::F32, &Device::Cpu)?;
    map.data().lock().unwrap_or_else(|error| error.into_inner()).remove("f64");
    let error = variables.apply(&snapshot).expect_err("one tensor is missing");
    assert!(
        matches!(error, CandleError::Missing { .. }) && error.to_string().contains("`absent`"),
        "{error}"
    );

    let builder = var_builder(&snapshot, DType::F32, &Device::Cpu);
    assert!(!builder.contains_tensor("absent") && builder.contains_tensor("f64"));
    let missing = builder.get(1, "absent").map(drop).expect_err("it is not in the set").to_string();
    assert!(missing.contains("version 1 of the set has no tensor `absent`"), "{missing}");
    let unlike = builder.get(3, "f32").map(drop).expect_err("it has another shape").to_string();
    assert!(unlike.contains("`f32` in version 1"), "{unlike}");
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}

#[tokio::test]
async fn types_that_only_one_side_has_are_errors_that_say_what_to_do() -> Outcome {
    let worker = Worker::client().start().await?;
    let complex = tensorwire::Tensor::from_values(worker.pool(), &[1], &[[1f32, 2.0]])?;
    let error = to_candle(&complex, &Device::Cpu).map(drop).expect_err("candle has no complex numbers");
    assert_eq!(
        error.to_string(),
        "candle has no elements of type c64: convert the tensor before it is committed"
    );
    let small = Tensor::zeros(2, DType::F8E4M3, &Device::Cpu)?;
    let error =
        from_candle(worker.pool(), &small).map(drop).expect_err("8-bit floats are not among the types");
    assert!(error.to_string().contains("F8E4M3"), "{error}");
    worker.shutdown().await;
    Ok(())
}

/// 4 MiB of values, so that other allocations do not matter.
const LENGTH: usize = 1 << 20;

#[tokio::test]
async fn each_tensor_is_copied_once_on_its_way_in_and_once_on_its_way_out() -> Outcome {
    let worker = Worker::client().start().await?;
    let values: Vec<f32> = (0..LENGTH).map(|value| value as f32).collect();
    let sent = Tensor::from_vec(values, LENGTH, &Device::Cpu)?;
    let bytes = (LENGTH * size_of::<f32>()) as u64;

    // Out: into the pool, and nowhere else.
    let before = worker.pool().stats().used_bytes;
    let mut tensor = None;
    let out = allocation_counter::measure(|| tensor = from_candle(worker.pool(), &sent).ok());
    let tensor = tensor.ok_or("the tensor does not fit into the pool")?;
    assert!(out.bytes_total < bytes / 16, "{out:?}");
    assert!(worker.pool().stats().used_bytes - before >= bytes);

    // In: one vector, which candle owns.
    let mut got = None;
    let into = allocation_counter::measure(|| got = to_candle(&tensor, &Device::Cpu).ok());
    let got = got.ok_or("candle does not take the tensor")?;
    assert!((bytes..bytes + bytes / 16).contains(&into.bytes_total), "{into:?}");
    assert_eq!(got.i(LENGTH - 1)?.to_scalar::<f32>()?, (LENGTH - 1) as f32);

    // A view of the middle is copied from where it is, too.
    let part = allocation_counter::measure(|| {
        drop(from_candle(worker.pool(), &sent.narrow(0, 10, LENGTH / 2).unwrap_or_else(|_| sent.clone())));
    });
    assert!(part.bytes_total < bytes / 16, "{part:?}");
    worker.shutdown().await;
    Ok(())
}
