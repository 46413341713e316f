//! Which driver the command runs on.

use anyhow::Result;
use cuvmm::driver::Error as DriverError;
use cuvmm::{CUresult, Device, Driver, Error, LoadError};
use cuvmm_sim::{Live, Machine, Simulator};

use crate::flags::Choice;

/// The driver chosen, and how to say so.
pub(crate) struct Chosen {
    pub(crate) device: Device,
    /// What it is, in words.
    pub(crate) words: String,
    /// How a second process is told to choose the same.
    pub(crate) choice: Choice,
    simulator: Option<Simulator>,
}

impl Chosen {
    pub(crate) fn new(choice: Choice) -> Result<Self> {
        match choice {
            Choice::Sim => Self::simulator(""),
            Choice::Cuda => Self::cuda(),
            Choice::Auto => Self::cuda().or_else(|error| {
                if is_absence(&error) {
                    Self::simulator(&format!("\n(there is no GPU here: {error:#})"))
                } else {
                    // A GPU that can't be used is to be mended, not passed over.
                    Err(error)
                }
            }),
        }
    }

    fn cuda() -> Result<Self> {
        let driver = Driver::load().map_err(Error::from)?;
        let device = driver.device(0).map_err(Error::from)?;
        let name = device.name().map_err(Error::from)?;
        let words = format!("{name}, CUDA driver {}", driver.version());
        Ok(Self { device, words, choice: Choice::Cuda, simulator: None })
    }

    fn simulator(reason: &str) -> Result<Self> {
        let simulator = Simulator::new(Machine::default());
        let device = simulator.driver().and_then(|driver| driver.device(0)).map_err(Error::from)?;
        let words = format!("the simulated driver: no GPU is used, and times are not a GPU's{reason}");
        Ok(Self { device, words, choice: Choice::Sim, simulator: Some(simulator) })
    }

    /// What is left behind, in words; none where nothing is.
    pub(crate) fn left_behind(&self) -> Option<String> {
        let stranded = self.device.driver().stranded().total();
        if stranded > 0 {
            return Some(format!("{stranded} values could not be given back"));
        }
        let simulator = self.simulator.as_ref()?;
        let violations = simulator.violations();
        if let Some(first) = violations.first() {
            return Some(format!("{} violations, the first: {first}", violations.len()));
        }
        let live = simulator.live();
        (live != Live::default()).then(|| format!("{live:?}"))
    }
}

/// Whether a failure says that there is no GPU, rather than that one can't be used.
fn is_absence(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<Error>() {
        Some(Error::Load(LoadError::LibraryNotFound { .. }) | Error::Driver(DriverError::NoSuchDevice { .. })) => true,
        Some(error) => error.code() == Some(CUresult::NO_DEVICE),
        None => false,
    }
}
