//! Gradients of the ranks of a group, within one process.

use std::{error::Error, future::Future, sync::Arc, time::Duration};

use burn::{
    backend::Flex,
    module::{Module, Param, ParamId},
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig},
    store::ModuleSnapshot as _,
    tensor::{DType, Device, Distribution, Tensor, Tolerance},
};
use tensorwire::{
    FabricKind, Worker,
    collective::{Group, store::MemoryStore},
};
use tensorwire_burn::{Error as BurnError, Replicas};

type Failure = Box<dyn Error + Send + Sync>;
type Outcome = Result<(), Failure>;

const LIMIT: Duration = Duration::from_secs(20);

/// Runs `body` on each rank of a group of a worker each, and returns what they return.
async fn ranks<T, F>(size: usize, fabric: FabricKind, body: impl Fn(Group) -> F) -> Result<Vec<T>, Failure>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Failure>> + Send + 'static,
{
    let mut workers = Vec::new();
    for rank in 0..size {
        workers.push(Worker::builder(&format!("rank_{rank}")).require(fabric).start().await?);
    }
    let store = Arc::new(MemoryStore::new(workers[0].runtime().clone()));
    let joining = workers.iter().enumerate().map(|(rank, worker)| {
        let (group, worker) = (Group::builder(store.clone(), rank, size).timeout(LIMIT), worker.clone());
        tokio::spawn(async move { group.join(&worker).await })
    });
    let joining: Vec<_> = joining.collect();
    let mut running = Vec::new();
    for joined in joining {
        running.push(joined.await??);
    }
    let running: Vec<_> = running.into_iter().map(|group| tokio::spawn(body(group))).collect();
    let mut results = Vec::new();
    for body in running {
        results.push(body.await??);
    }
    for worker in workers {
        worker.shutdown().await;
    }
    Ok(results)
}

/// A small network, on a device with autodiff.
#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    /// Not trained.
    scale: Param<Tensor<1>>,
}

fn device() -> Device {
    Device::flex().autodiff()
}

impl Net {
    fn new() -> Self {
        let scale = Tensor::from_data([0.5f32], &device());
        Self {
            layers: [(3, 5), (5, 2)].map(|(from, to)| LinearConfig::new(from, to).init(&device())).to_vec(),
            scale: Param::initialized(ParamId::new(), scale),
        }
    }

    fn loss(&self, inputs: Tensor<2>) -> Tensor<1> {
        let hidden = self.layers.iter().fold(inputs, |values, layer| layer.forward(values).tanh());
        (hidden * self.scale.val().unsqueeze()).sub_scalar(1.0).powi_scalar(2).mean()
    }

    fn gradients(&self, inputs: Tensor<2>) -> GradientsParams {
        GradientsParams::from_grads(self.loss(inputs).backward(), self)
    }
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

/// Bytes of all parameters.
fn bits<M: Module>(module: &M) -> Result<Vec<u8>, Failure> {
    let mut all = Vec::new();
    for tensor in module.collect(None, None, false) {
        all.extend_from_slice(&tensor.into_bytes().map_err(|error| error.to_string())?);
    }
    Ok(all)
}

const STEPS: usize = 20;

#[tokio::test(flavor = "multi_thread")]
async fn ranks_learn_what_one_process_learns_from_the_whole_batch() -> Outcome {
    let batch = Tensor::<2>::random([12, 3], Distribution::Default, &Device::flex()).to_data();
    for (size, fabric) in [(2, FabricKind::SHM), (2, FabricKind::TCP), (3, FabricKind::SHM)] {
        let begun = Net::new();
        let mut alone = begun.clone();
        let mut optimiser = AdamConfig::new().init();
        for _ in 0..STEPS {
            let gradients = alone.gradients(Tensor::from_data(batch.clone(), &device()));
            alone = optimiser.step(0.01, alone, gradients);
        }

        let trained = ranks(size, fabric, |group| {
            // The others begin with weights of their own, and get those of rank 0.
            let mut net = if group.rank() == 0 { begun.clone() } else { Net::new() };
            let part = 12 / size;
            let own = part * group.rank()..part * (group.rank() + 1);
            let inputs = Tensor::<2>::from_data(batch.clone(), &device()).slice([own]);
            async move {
                let mut optimiser = AdamConfig::new().init();
                let (replicas, steps) = Replicas::align(&group, 0, &mut net, &mut optimiser).await?;
                assert_eq!(steps, 0);
                for _ in 0..STEPS {
                    let gradients = replicas.average(&net, net.gradients(inputs.clone())).await?;
                    net = optimiser.step(0.01, net, gradients);
                }
                group.close().await?;
                Ok(net)
            }
        })
        .await?;
        assert_ne!(bits(&begun)?, bits(&alone)?);
        for net in &trained {
            assert_eq!(bits(net)?, bits(&trained[0])?, "{size} ranks over {fabric}");
            for (layer, expected) in net.layers.iter().zip(&alone.layers) {
                let expected = expected.weight.val().into_data();
                layer.weight.val().into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-4));
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn all_ranks_get_the_weights_and_the_steps_of_the_one_that_is_ahead() -> Outcome {
    let aligned = ranks(3, FabricKind::SHM, |group| async move {
        let mut net = Net::new();
        let before = bits(&net)?;
        // Ranks 1 and 2 are both ahead of rank 0.
        let (_, steps) = Replicas::align(&group, [6, 7, 7][group.rank()], &mut net, &mut adam()).await?;
        group.clone().close().await?;
        Ok((steps, before, bits(&net)?))
    })
    .await?;
    for (steps, _, after) in &aligned {
        assert_eq!((*steps, after), (7, &aligned[1].1));
    }
    assert_ne!(aligned[0].1, aligned[1].1);
    Ok(())
}

/// Does these steps, each rank with inputs of its own.
async fn train(
    replicas: &Replicas,
    net: &mut Net,
    optimiser: &mut ModuleOptimizer,
    steps: std::ops::Range<u64>,
) -> Outcome {
    let inputs = Tensor::<2>::ones([2, 3], &device()).mul_scalar(1 + replicas.group().rank() as u32);
    for _ in steps {
        let gradients = replicas.average(net, net.gradients(inputs.clone())).await?;
        *net = optimiser.step(0.05, net.clone(), gradients);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_failed_on_one_rank_leaves_no_difference_in_the_optimisers() -> Outcome {
    for (size, of_ranks) in [(2, [4, 3, 0]), (3, [3, 4, 3])] {
        let trained = ranks(size, FabricKind::SHM, |group| async move {
            let (mut net, mut optimiser) = (Net::new(), adam());
            let (replicas, _) = Replicas::align(&group, 0, &mut net, &mut optimiser).await?;
            train(&replicas, &mut net, &mut optimiser, 0..3).await?;
            let done = of_ranks[group.rank()];
            if done > 3 {
                let gradients = net.gradients(Tensor::ones([2, 3], &device()));
                net = optimiser.step(0.05, net, gradients);
            }
            let (replicas, step) = Replicas::align(&group, done, &mut net, &mut optimiser).await?;
            train(&replicas, &mut net, &mut optimiser, step..8).await?;
            group.close().await?;
            Ok(net)
        })
        .await?;
        for net in &trained {
            assert_eq!(bits(net)?, bits(&trained[0])?, "{size} ranks");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admitted_rank_trains_on_as_the_others_do() -> Outcome {
    let (mut groups, mut workers) = (Vec::new(), Vec::new());
    for name in ["first", "second", "newcomer"] {
        workers.push(Worker::builder(name).require(FabricKind::TCP).start().await?);
    }
    let store = Arc::new(MemoryStore::new(workers[0].runtime().clone()));
    for (rank, worker) in workers.iter().enumerate() {
        let (builder, worker) = (Group::builder(store.clone(), rank % 2, 2).timeout(LIMIT), worker.clone());
        let coming =
            async move { if rank < 2 { builder.join(&worker).await } else { builder.rejoin(&worker).await } };
        groups.push(tokio::spawn(coming));
    }
    let newcomer = groups.pop().ok_or("there are three")?;
    let mut running = vec![tokio::spawn(async move {
        let (group, mut net, mut optimiser) = (newcomer.await??, Net::new(), adam());
        let (replicas, step) = Replicas::align(&group, 0, &mut net, &mut optimiser).await?;
        train(&replicas, &mut net, &mut optimiser, step..9).await?;
        Ok::<_, Failure>((group.size(), step, net))
    })];
    for joined in groups {
        running.push(tokio::spawn(async move {
            let (mut group, mut net, mut optimiser) = (joined.await??, Net::new(), adam());
            let (replicas, _) = Replicas::align(&group, 0, &mut net, &mut optimiser).await?;
            train(&replicas, &mut net, &mut optimiser, 0..4).await?;
            while group.waiting().await? == 0 {
                tokio::task::yield_now().await;
            }
            group = group.admit().await?;
            let (replicas, step) = Replicas::align(&group, 4, &mut net, &mut optimiser).await?;
            train(&replicas, &mut net, &mut optimiser, step..9).await?;
            Ok((group.size(), step, net))
        }));
    }
    let mut trained = Vec::new();
    for running in running {
        let (size, step, net) = running.await??;
        assert_eq!((size, step), (3, 4));
        trained.push(bits(&net)?);
    }
    assert!(trained.iter().all(|net| *net == trained[0]));
    for worker in workers {
        worker.shutdown().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_optimiser_of_another_kind_is_refused() -> Outcome {
    let errors = ranks(2, FabricKind::SHM, |group| async move {
        let (mut net, mut optimiser) = (Net::new(), adam());
        let (replicas, _) = Replicas::align(&group, 0, &mut net, &mut optimiser).await?;
        train(&replicas, &mut net, &mut optimiser, 0..1).await?;
        if group.rank() == 1 {
            optimiser = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        }
        let before = bits(&net)?;
        let aligned = Replicas::align(&group, 1, &mut net, &mut optimiser).await;
        assert_eq!(bits(&net)?, before);
        group.close().await?;
        Ok(aligned.err().map(|error| error.to_string()))
    })
    .await?;
    let text = "the optimiser of rank 1 cannot have the state of that of rank 0: build the same optimiser on all ranks";
    assert_eq!(errors, [None, Some(text.to_owned())]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_that_differ_are_named_on_all_ranks_and_the_group_goes_on() -> Outcome {
    let errors = ranks(3, FabricKind::SHM, |group| async move {
        let mut net = Net::new();
        if group.rank() == 1 {
            net.layers[1] = LinearConfig::new(2, 5).init(&device());
        }
        let before = bits(&net)?;
        let error =
            Replicas::align(&group, 0, &mut net, &mut adam()).await.err().ok_or("the modules differ")?;
        assert!(matches!(error, BurnError::OtherModule { .. }), "{error}");
        assert_eq!(bits(&net)?, before);

        // What is trained is compared, too.
        let mut net = Net::new();
        if group.rank() == 2 {
            net.layers[0] = net.layers[0].clone().no_grad();
        }
        let frozen =
            Replicas::align(&group, 0, &mut net, &mut adam()).await.err().ok_or("one trains less")?;
        Replicas::align(&group, 0, &mut Net::new(), &mut adam()).await?;
        group.close().await?;
        Ok((error.to_string(), frozen.to_string()))
    })
    .await?;
    let [even, odd] = ["`layers.1.weight` F32 [5, 2]", "`layers.1.weight` F32 [2, 5]"];
    let text = |rank, own, other, theirs| {
        format!("rank {rank} has {own} where rank {other} has {theirs}: build the same module on all ranks")
    };
    assert_eq!(errors[0].0, text(0, even, 1, odd));
    assert_eq!(errors[1].0, text(1, odd, 0, even));
    assert_eq!(errors[2].0, text(2, even, 1, odd));
    assert!(
        errors[0].1.contains("has `layers.0.weight` F32 [3, 5] trained where rank 2 has"),
        "{}",
        errors[0].1
    );
    Ok(())
}

/// Parameters of different element types and lengths, of which a rank may use any.
#[derive(Module, Debug)]
struct Mixed {
    wide: Param<Tensor<1>>,
    narrow: Param<Tensor<1>>,
    long: Param<Tensor<1>>,
}

fn values(gradients: &GradientsParams, id: ParamId) -> Result<Vec<f32>, Failure> {
    let data = gradients.get::<1>(id).ok_or("a rank has a gradient")?.into_data();
    Ok(data.try_into_vec_as().map_err(|error| format!("{error:?}"))?)
}

/// The elements of a gradient that is averaged alone.
const LONG: usize = 1 << 18;

impl Mixed {
    fn new() -> Self {
        let of = |length, dtype| {
            let tensor = Tensor::<1>::full([length], 2.0, (&device(), dtype));
            Param::initialized(ParamId::new(), tensor.require_grad())
        };
        Self { wide: of(1, DType::F32), narrow: of(1, DType::F16), long: of(LONG, DType::BF16) }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_without_a_gradient_counts_as_zeros_and_none_at_all_stays_none() -> Outcome {
    ranks(2, FabricKind::SHM, |group| async move {
        let mut model = Mixed::new();
        let (replicas, _) = Replicas::align(&group, 0, &mut model, &mut adam()).await?;

        // Rank 0 uses all, and rank 1 the first only.
        let mut loss = model.wide.val().mul_scalar(3.0).sum();
        if group.rank() == 0 {
            loss = loss + model.narrow.val().cast(DType::F32).mul_scalar(5.0).sum();
            loss = loss + model.long.val().cast(DType::F32).mul_scalar(7.0).sum();
        }
        let mean = replicas.average(&model, GradientsParams::from_grads(loss.backward(), &model)).await?;
        assert_eq!(values(&mean, model.wide.id)?, [3.0]);
        assert_eq!(values(&mean, model.narrow.id)?, [2.5]);
        assert!(values(&mean, model.long.id)? == [3.5; LONG]);
        let types = [model.narrow.id, model.long.id].map(|id| mean.get::<1>(id).map(|mean| mean.dtype()));
        assert_eq!(types, [Some(DType::F16), Some(DType::BF16)]);

        // No rank has one of any.
        let mean = replicas.average(&model, GradientsParams::new()).await?;
        assert!(mean.is_empty());
        group.close().await?;
        Ok(())
    })
    .await?;
    Ok(())
}

/// 4 MiB of values, so that other allocations do not matter.
const SIDE: usize = 1 << 10;
const BYTES: u64 = (SIDE * SIDE * size_of::<f32>()) as u64;

/// The address of a gradient.
fn address<const D: usize>(gradients: &GradientsParams, id: ParamId) -> Result<usize, Failure> {
    let tensor = gradients.get::<D>(id).ok_or("it has a gradient")?.try_into_primitive::<Flex>();
    Ok(tensor.map_err(|error| format!("{error:?}"))?.bytes().as_ptr().addr())
}

/// The modules, the first of which has a long gradient, and gradients, all 1.
fn large() -> (Vec<Linear>, GradientsParams) {
    let layers =
        [(SIDE, SIDE), (3, 5)].map(|(from, to)| LinearConfig::new(from, to).init(&device())).to_vec();
    let mut gradients = GradientsParams::new();
    for Linear { weight, bias } in &layers {
        gradients.register(weight.id, Tensor::<2>::ones(weight.shape(), &Device::flex()));
        if let Some(bias) = bias {
            gradients.register(bias.id, Tensor::<1>::ones(bias.shape(), &Device::flex()));
        }
    }
    (layers, gradients)
}

#[test]
fn long_gradients_stay_where_they_are_and_short_ones_become_parts_of_one_tensor() -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let both = runtime.block_on(async {
        let mut workers = Vec::new();
        for rank in 0..2 {
            workers.push(Worker::builder(&format!("rank_{rank}")).require(FabricKind::SHM).start().await?);
        }
        let store = Arc::new(MemoryStore::new(workers[0].runtime().clone()));
        let join = async |rank: usize| -> Result<_, Failure> {
            let group = Group::builder(store.clone(), rank, 2).timeout(LIMIT).join(&workers[rank]).await?;
            let (mut model, gradients) = large();
            Ok((Replicas::align(&group, 0, &mut model, &mut adam()).await?.0, model, gradients))
        };
        let (first, second) = tokio::join!(join(0), join(1));
        Ok::<_, Failure>((first?, second?))
    });
    let ((first, model, gradients), (second, other, others)) = both?;
    let long = model[0].weight.id;
    let before = address::<2>(&gradients, long)?;
    let mut means = None;
    let measured = allocation_counter::measure(|| {
        means = Some(runtime.block_on(async {
            tokio::join!(first.average(&model, gradients), second.average(&other, others))
        }));
    });
    assert!(measured.bytes_total < BYTES / 16, "{measured:?}");
    let (mean, _) = means.ok_or("it was measured")?;
    let (mean, bias) = (mean?, model[0].bias.as_ref().ok_or("it has a bias")?.id);
    assert_eq!(address::<2>(&mean, long)?, before);
    assert_eq!(mean.get::<2>(long).map(|mean| mean.sum().into_scalar()), Some((SIDE * SIDE) as f32));
    // The first bias is followed by the second weight.
    assert_eq!(
        address::<2>(&mean, model[1].weight.id)?,
        address::<1>(&mean, bias)? + SIDE * size_of::<f32>()
    );
    Ok(())
}

#[tokio::test]
async fn a_module_that_has_changed_its_form_is_refused() -> Outcome {
    let worker = Worker::builder("alone").start().await?;
    let store = Arc::new(MemoryStore::new(worker.runtime().clone()));
    let group = Group::builder(store, 0, 1).join(&worker).await?;
    let mut net = Net::new();
    let (replicas, _) = Replicas::align(&group, 0, &mut net, &mut adam()).await?;
    net.layers.push(LinearConfig::new(2, 2).init(&device()));
    let error = replicas.average(&net, GradientsParams::new()).await.err().ok_or("it has one more")?;
    assert!(
        error.to_string().starts_with("`layers.2.weight` F32 [2, 2] was no further parameter"),
        "{error}"
    );

    // One rank alone gets its own gradients.
    let net = Net::new();
    let inputs = Tensor::<2>::ones([2, 3], &device());
    let own = net.gradients(inputs.clone());
    let mean = replicas.average(&net, net.gradients(inputs)).await?;
    let id = net.layers[0].weight.id;
    let [own, mean] = [own, mean].map(|gradients| gradients.get::<2>(id).map(Tensor::into_data));
    assert!(own.is_some() && own == mean);
    group.close().await?;
    worker.shutdown().await;
    Ok(())
}
