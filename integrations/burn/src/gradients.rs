//! Gradients of a module on their way into the buffers of an all-reduce, and out of its results.

use std::{ops::Range, pin::Pin};

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, Tensor, TensorData},
};
use tensorwire::memory::{BufMut, Pool};

use crate::{
    convert::{shared, to_tensorwire},
    error::Error,
    parameters::{Parameter, Path},
};

/// Where the gradients of all trained parameters are: those of one element type in one tensor, in the module's order, and behind them a
/// number for each of these parameters, which is 1 on ranks that have a gradient of it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) trained: Vec<Parameter>,
    places: Vec<Place>,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Place {
    part: usize,
    elements: Range<usize>,
    /// Which of the part's parameters it is.
    number: usize,
}

/// The gradients of one element type.
#[derive(Debug)]
struct Part {
    dtype: DType,
    parameters: usize,
    elements: usize,
}

impl Part {
    fn length(&self) -> usize {
        self.elements + self.parameters
    }

    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        let width = self.dtype.size();
        elements.start * width..elements.end * width
    }

    fn flag(&self, number: usize) -> Range<usize> {
        self.bytes(self.elements + number..self.elements + number + 1)
    }
}

impl Plan {
    /// # Errors
    /// [`Error::UnknownToTensorwire`].
    pub(crate) fn new(trained: Vec<Parameter>) -> Result<Self, Error> {
        let (mut places, mut parts) = (Vec::new(), Vec::<Part>::new());
        for Parameter { name, dtype, shape } in &trained {
            if to_tensorwire(*dtype).is_none() {
                return Err(Error::UnknownToTensorwire { name: name.clone(), dtype: *dtype });
            }
            let part = parts.iter().position(|part| part.dtype == *dtype).unwrap_or(parts.len());
            if part == parts.len() {
                parts.push(Part { dtype: *dtype, parameters: 0, elements: 0 });
            }
            let Part { parameters, elements, .. } = &mut parts[part];
            let end = *elements + shape.iter().product::<usize>();
            places.push(Place { part, elements: *elements..end, number: *parameters });
            (*elements, *parameters) = (end, *parameters + 1);
        }
        Ok(Self { trained, places, parts })
    }

    /// The tensors of an all-reduce, one for each element type. Parameters without a gradient get zeros.
    ///
    /// # Errors
    /// [`Error::Burn`]; [`Error::Worker`] if the pool has no room.
    pub(crate) async fn fill(
        &self,
        pool: &Pool,
        gradients: Vec<Option<Reading>>,
    ) -> Result<Vec<tensorwire::Tensor>, Error> {
        let width = |part: &Part| pool.try_alloc(part.length() * part.dtype.size());
        let buffers = self.parts.iter().map(width).collect::<Result<Vec<_>, _>>();
        let mut buffers = buffers.map_err(tensorwire::WorkerError::from)?;
        for (place, gradient) in self.places.iter().zip(gradients) {
            let data = match gradient {
                Some(reading) => Some(reading.await?),
                None => None,
            };
            let (part, buffer) = (&self.parts[place.part], &mut buffers[place.part]);
            write(part, place, buffer, data.as_ref())?;
        }
        let tensor = |(part, buffer): (&Part, BufMut)| {
            // It was looked up in `new`.
            let dtype = to_tensorwire(part.dtype).unwrap_or(tensorwire::DataType::F32);
            Ok(tensorwire::Tensor::new(buffer, dtype, &[part.length() as u64])?)
        };
        self.parts.iter().zip(buffers).map(tensor).collect()
    }

    /// Views of the results, one for each trained parameter; `None` if no rank had a gradient.
    fn views(&self, results: Vec<tensorwire::Tensor>) -> Vec<Option<burn::tensor::Bytes>> {
        let results: Vec<bytes::Bytes> = results.into_iter().map(Into::into).collect();
        let view = |place: &Place| {
            let (part, result) = (&self.parts[place.part], results.get(place.part)?);
            let has_any = result.get(part.flag(place.number))?.iter().any(|&byte| byte != 0);
            has_any.then(|| shared(result.slice(part.bytes(place.elements.clone())), part.dtype))
        };
        self.places.iter().map(view).collect()
    }

    /// Gradients that are views of the results of an all-reduce.
    ///
    /// # Errors
    /// [`Error::Burn`].
    pub(crate) fn give<M: Module>(
        &self,
        module: &M,
        results: Vec<tensorwire::Tensor>,
    ) -> Result<GradientsParams, Error> {
        let views = self.views(results).into_iter().zip(&self.trained);
        let mut giving = Giving { views, given: GradientsParams::new(), problem: None };
        module.visit(&mut giving);
        giving.problem.map_or(Ok(giving.given), |problem| Err(Error::Burn(problem)))
    }
}

fn write(part: &Part, place: &Place, buffer: &mut BufMut, data: Option<&TensorData>) -> Result<(), Error> {
    let flag = &mut buffer[part.flag(place.number)];
    // The memory is that of earlier tensors.
    flag.fill(0);
    match (data, part.dtype) {
        (None, _) => {}
        (Some(_), DType::F64) => flag.copy_from_slice(&1f64.to_le_bytes()),
        (Some(_), DType::F16) => flag.copy_from_slice(&tensorwire::f16::ONE.to_le_bytes()),
        (Some(_), DType::BF16) => flag.copy_from_slice(&tensorwire::bf16::ONE.to_le_bytes()),
        (Some(_), _) => flag.copy_from_slice(&1f32.to_le_bytes()),
    }
    let values = &mut buffer[part.bytes(place.elements.clone())];
    match data {
        None => values.fill(0),
        Some(data) if data.bytes().len() == values.len() => values.copy_from_slice(data.bytes()),
        Some(data) => {
            return Err(Error::Burn(format!(
                "a gradient has {} bytes, not {}",
                data.bytes().len(),
                values.len()
            )));
        }
    }
    Ok(())
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

struct Giving<V> {
    /// Of the parameters that are yet to be visited.
    views: V,
    given: GradientsParams,
    problem: Option<String>,
}

impl<'a, V: Iterator<Item = (Option<burn::tensor::Bytes>, &'a Parameter)>> ModuleVisitor for Giving<V> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        let Some((Some(view), parameter)) = self.views.next() else { return };
        match TensorData::try_from_bytes(view, parameter.shape.clone(), parameter.dtype) {
            Ok(data) => {
                // Gradients are of the device without autodiff.
                let device = param.device().inner();
                self.given.register(param.id, Tensor::<D>::from_data(data, (&device, parameter.dtype)));
            }
            Err(error) => self.problem = Some(format!("`{}`: {error}", parameter.name)),
        }
    }
}
