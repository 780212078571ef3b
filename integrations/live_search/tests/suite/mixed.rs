//! The probe: a model with exactly one version's weights has its bits, and one with parts of two has not.

use std::time::Duration;

use crate::tiny::{Kind, Outcome, Tiny};
use candle_core::{Device, Tensor};
use live_search::{
    model::{Index, Model},
    tokens::Tokens,
    tunable::Tunable,
};
use tensorwire::{Worker, sets::Snapshot};
use tensorwire_candle::{from_candle, named_tensors};
use tokio::time::timeout;

/// The longest duration of a fetch.
const LIMIT: Duration = Duration::from_secs(30);
const PROBE_TEXT: &str = "a small program that finds files by what they contain";

/// Changes the last layer a little.
fn nudge(tunable: &Tunable) -> Outcome {
    let variables = tunable.variables.data().lock().map_err(|error| error.to_string())?;
    for (_, variable) in variables.iter().filter(|(name, _)| name.starts_with(&tunable.config.tuned_prefix()))
    {
        variable.set(&(variable.as_tensor() + 1e-4)?)?;
    }
    Ok(())
}

type Named = Vec<(String, tensorwire::Tensor)>;

/// The tensors of a version: all weights, and the probe.
fn version_of(
    worker: &Worker,
    tunable: &Tunable,
    tokens: &Tokens,
) -> Result<Named, Box<dyn std::error::Error + Send + Sync>> {
    let mut tensors = named_tensors(worker.pool(), &tunable.variables)?;
    let probe = tunable.encoder.embed(&tokens.batch(&[PROBE_TEXT])?)?;
    tensors.push(("probe".to_owned(), from_candle(worker.pool(), &probe)?));
    tensors.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(tensors)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_with_one_tensor_of_another_is_noticed() -> Outcome {
    let tiny = Tiny::make(Kind::Bert)?;
    let tokens = Tokens::load(&tiny.model(), 24)?;
    let (trainer, service) = (Worker::builder("trainer").start().await?, Worker::client().start().await?);
    let set = trainer.set("encoder");
    let tunable = Tunable::load(&tiny.model())?;
    let first = version_of(&trainer, &tunable, &tokens)?;
    nudge(&tunable)?;
    let second = version_of(&trainer, &tunable, &tokens)?;
    let mut mixed = second.clone();
    let part = mixed
        .iter()
        .position(|(name, _)| name == "encoder.layer.1.output.dense.weight")
        .ok_or("no such tensor")?;
    mixed[part] = first[part].clone();

    let peer = service.peer_at(trainer.address()).await?;
    let documents = Tensor::ones((1, 16), candle_core::DType::F32, &Device::Cpu)?;
    let index = Index::new(["one".to_owned()], &documents)?;
    let mut model = Model::new(Tunable::load(&tiny.model())?, tokens, index)?;
    for (version, tensors, differences) in
        [(1, first, 0), (2, second.clone(), 0), (3, mixed, 1), (4, second, 1)]
    {
        set.commit(version, tensors).await?;
        let fetched: Snapshot = timeout(LIMIT, peer.set("encoder").fetch()).await??;
        model.apply(&fetched)?;
        assert_eq!(
            (model.checks().made, model.checks().differences),
            (version, differences),
            "version {version}"
        );
        assert_eq!(model.search("s", "small editor", 10)?.version, version);
    }
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_without_a_probe_changes_nothing() -> Outcome {
    let tiny = Tiny::make(Kind::Bert)?;
    let (trainer, tunable) = (Worker::builder("bare").start().await?, Tunable::load(&tiny.model())?);
    let service = Worker::client().start().await?;
    trainer.set("encoder").commit(1, named_tensors(trainer.pool(), &tunable.variables)?).await?;
    let set = service.peer_at(trainer.address()).await?.set("encoder");
    let index = Index::new([], &Tensor::ones((0, 16), candle_core::DType::F32, &Device::Cpu)?)?;
    let mut model = Model::new(tunable, Tokens::load(&tiny.model(), 24)?, index)?;
    let refused = model.apply(&timeout(LIMIT, set.fetch()).await??).err().ok_or("it was applied")?;
    assert!(refused.to_string().contains("`probe`"), "{refused}");
    assert!(model.search("s", "small editor", 10).is_err(), "there is no version yet");
    service.shutdown().await;
    trainer.shutdown().await;
    Ok(())
}
