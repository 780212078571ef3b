//! Gradients of a module, and their means over the ranks of a group.

use std::{ops::Range, pin::Pin};

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{Bytes, DType, Tensor, TensorData, bf16, f16},
};
use tensorwire::{
    DataType, WorkerError,
    collective::{Group, Reduction},
    memory::Pool,
};

use crate::{
    convert::{shared, to_tensorwire},
    error::Error,
    parameters::{Parameter, Path},
};

/// Gradients from this length on are averaged alone, in their own memory.
const LONG_BYTES: usize = 256 << 10;
/// How long gradients in one tensor may be together, so that a processor's cache still has what was written when it is combined.
const PART_BYTES: usize = 1 << 20;

/// The trained parameters of a module, and how their gradients travel: each rank makes the same calls for them.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) trained: Vec<Parameter>,
    /// The numbers of those with long gradients.
    long: Vec<usize>,
    /// The others.
    parts: Vec<Part>,
}

/// Gradients of one element type, in one tensor.
#[derive(Debug)]
struct Part {
    dtype: DType,
    sent_as: DataType,
    elements: usize,
    places: Vec<Place>,
}

/// The elements of a trained parameter.
#[derive(Debug)]
struct Place {
    parameter: usize,
    elements: Range<usize>,
}

impl Plan {
    /// # Errors
    /// [`Error::UnknownToTensorwire`].
    pub(crate) fn new(trained: Vec<Parameter>) -> Result<Self, Error> {
        let (mut long, mut parts) = (Vec::new(), Vec::<Part>::new());
        for (number, parameter) in trained.iter().enumerate() {
            let Parameter { name, dtype, .. } = parameter;
            let Some(sent_as) = to_tensorwire(*dtype) else {
                return Err(Error::UnknownToTensorwire { name: name.clone(), dtype: *dtype });
            };
            let elements = parameter.elements();
            let bytes = elements * dtype.size();
            if bytes >= LONG_BYTES {
                long.push(number);
                continue;
            }
            let has_room =
                |part: &Part| part.dtype == *dtype && part.elements * dtype.size() + bytes <= PART_BYTES;
            match parts.iter_mut().find(|part| has_room(part)) {
                Some(part) => part.add(number, elements),
                None => {
                    let mut part = Part { dtype: *dtype, sent_as, elements: 0, places: Vec::new() };
                    part.add(number, elements);
                    parts.push(part);
                }
            }
        }
        Ok(Self { trained, long, parts })
    }

    /// The means of the gradients over all ranks; `None` where no rank has one. A rank without one counts as one with zeros.
    ///
    /// # Errors
    /// [`Error::Group`]; [`Error::Burn`]; [`Error::Worker`] if the pool has no room.
    pub(crate) async fn means(
        &self,
        group: &Group,
        mut gradients: Vec<Option<Reading>>,
    ) -> Result<Vec<Option<TensorData>>, Error> {
        let mut holders: Vec<u32> = gradients.iter().map(|gradient| u32::from(gradient.is_some())).collect();
        group.all_reduce(&mut holders).await?;
        let has_any = |number: usize| holders.get(number).is_some_and(|holders| *holders > 0);
        let mut means = Vec::new();
        means.resize_with(gradients.len(), || None);
        for part in &self.parts {
            let tensor = part.fill(group.worker().pool(), &mut gradients).await?;
            let result = group.all_reduce_tensors([tensor]).reduction(Reduction::Mean).await?;
            let result = bytes::Bytes::from(result);
            for place in part.places.iter().filter(|place| has_any(place.parameter)) {
                let mean = shared(result.slice(part.bytes(&place.elements)), part.dtype);
                means[place.parameter] = Some(self.trained[place.parameter].with(mean)?);
            }
        }
        for number in self.long.iter().copied().filter(|number| has_any(*number)) {
            let gradient = gradients.get_mut(number).and_then(Option::take);
            means[number] = Some(mean_of(group, &self.trained[number], gradient).await?);
        }
        Ok(means)
    }
}

impl Part {
    fn add(&mut self, parameter: usize, elements: usize) {
        let begin = self.elements;
        self.elements += elements;
        self.places.push(Place { parameter, elements: begin..self.elements });
    }

    fn bytes(&self, elements: &Range<usize>) -> Range<usize> {
        let width = self.dtype.size();
        elements.start * width..elements.end * width
    }

    /// Reads its gradients into a tensor.
    async fn fill(
        &self,
        pool: &Pool,
        gradients: &mut [Option<Reading>],
    ) -> Result<tensorwire::Tensor, Error> {
        let mut buffer = pool.try_alloc(self.elements * self.dtype.size()).map_err(WorkerError::from)?;
        for place in &self.places {
            let values = self.bytes(&place.elements);
            match gradients.get_mut(place.parameter).and_then(Option::take) {
                // Its form was compared with that of the parameter, so its length is right.
                Some(gradient) => buffer[values].copy_from_slice(gradient.await?.bytes()),
                // The memory is that of earlier tensors.
                None => buffer[values].fill(0),
            }
        }
        Ok(tensorwire::Tensor::new(buffer, self.sent_as, &[self.elements as u64])?)
    }
}

/// The mean of a long gradient, in its own memory.
async fn mean_of(
    group: &Group,
    parameter: &Parameter,
    gradient: Option<Reading>,
) -> Result<TensorData, Error> {
    let mut data = match gradient {
        Some(gradient) => gradient.await?,
        None => {
            parameter.with(Bytes::from_bytes_vec(vec![0; parameter.elements() * parameter.dtype.size()]))?
        }
    };
    macro_rules! averaged {
        ($rust:ty) => {{
            let values = data.as_mut_slice::<$rust>().map_err(|error| parameter.unfit(&error))?;
            group.all_reduce(values).reduction(Reduction::Mean).await?
        }};
    }
    match parameter.dtype {
        DType::F64 => averaged!(f64),
        DType::F16 => averaged!(f16),
        DType::BF16 => averaged!(bf16),
        // Trained parameters are floats.
        _ => averaged!(f32),
    }
    Ok(data)
}

/// Gradients that are the `means` of the trained parameters.
pub(crate) fn give<M: Module>(module: &M, means: Vec<Option<TensorData>>) -> GradientsParams {
    let mut giving = Giving { means: means.into_iter(), given: GradientsParams::new() };
    module.visit(&mut giving);
    giving.given
}

/// A gradient that is read back from its device.
pub(crate) type Reading = Pin<Box<dyn Future<Output = Result<TensorData, Error>> + Send>>;

/// The trained parameters of a module, in its order, and their gradients. Parameters are initialised.
pub(crate) fn take<M: Module>(
    module: &M,
    gradients: GradientsParams,
) -> (Vec<Parameter>, Vec<Option<Reading>>) {
    let mut taking = Taking { path: Path::default(), gradients, trained: Vec::new(), taken: Vec::new() };
    module.visit(&mut taking);
    (taking.trained, taking.taken)
}

struct Taking {
    path: Path,
    gradients: GradientsParams,
    trained: Vec<Parameter>,
    taken: Vec<Option<Reading>>,
}

impl ModuleVisitor for Taking {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.leave();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        let gradient = self.gradients.remove::<D>(param.id);
        let (dtype, shape) = match &gradient {
            Some(gradient) => (gradient.dtype(), gradient.shape()),
            None => (param.base().dtype(), param.base().shape()),
        };
        self.trained.push(Parameter { name: self.path.name(), dtype, shape: shape.to_vec() });
        self.taken.push(gradient.map(|gradient| -> Reading {
            Box::pin(async {
                gradient.into_data_async().await.map_err(|error| Error::Burn(error.to_string()))
            })
        }));
    }
}

struct Giving {
    /// Of the parameters that are yet to be visited.
    means: std::vec::IntoIter<Option<TensorData>>,
    given: GradientsParams,
}

impl ModuleVisitor for Giving {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        let Some(Some(mean)) = self.means.next() else { return };
        // Gradients are of the device without autodiff.
        let (device, dtype) = (param.device().inner(), mean.dtype());
        self.given.register(param.id, Tensor::<D>::from_data(mean, (&device, dtype)));
    }
}
