//! The recorder of the process, and what Prometheus reads of it.

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tensorwire::Worker;

/// Upper bounds of the histogram of receives, in seconds: from a short value over shared memory to one of gigabytes.
const SECONDS: [f64; 15] =
    [1e-6, 5e-6, 25e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 10e-3, 50e-3, 250e-3, 1.0, 5.0, 15.0, 60.0];

/// The metrics of the process in Prometheus' text format.
#[derive(Clone)]
pub struct Metrics {
    recorder: PrometheusHandle,
}

/// Why no recorder was installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The process has one already.
    #[error(
        "the recorder of metrics cannot be installed: {0}; if the program installs one, pass its handle to Metrics::of"
    )]
    Recorder(#[from] BuildError),
}

impl Metrics {
    /// Installs the process's recorder, in which times are histograms with fixed bounds, which can be added up over
    /// processes. Call it before the first worker starts: a worker finds its counters when it connects.
    ///
    /// # Errors
    /// [`InstallError::Recorder`] if the process has a recorder.
    pub fn install() -> Result<Self, InstallError> {
        let seconds = Matcher::Suffix("_seconds".to_owned());
        let recorder =
            PrometheusBuilder::new().set_buckets_for_metric(seconds, &SECONDS)?.install_recorder()?;
        Ok(Self { recorder })
    }

    /// Of a recorder that the program has installed.
    pub fn of(recorder: PrometheusHandle) -> Self {
        Self { recorder }
    }

    /// The page that Prometheus reads. The gauges are those of this moment.
    pub fn render(&self, worker: &Worker) -> String {
        worker.record_metrics();
        self.recorder.run_upkeep();
        self.recorder.render()
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Metrics").finish_non_exhaustive()
    }
}
