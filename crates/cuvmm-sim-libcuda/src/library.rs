//! The one driver of the process.

use std::sync::OnceLock;

use cuvmm_driver::{RawDriver, Served};
use cuvmm_sim::{Machine, Simulator};

use crate::configuration::Configuration;
use crate::log;

/// The driver, made at the first call as the environment says.
static DRIVER: OnceLock<Simulator> = OnceLock::new();

/// Serves the one driver.
pub(crate) struct Library;

impl Served for Library {
    fn served() -> &'static dyn RawDriver {
        driver()
    }
}

/// The driver itself.
pub(crate) fn driver() -> &'static Simulator {
    DRIVER.get().unwrap_or_else(start)
}

/// Makes the driver. Of threads that do so at once the first to be done has made it, and none waits for another: a
/// process that is forked meanwhile would wait for a thread that it does not have.
fn start() -> &'static Simulator {
    let variables = std::env::vars_os();
    let variables = variables.map(|(name, value)| (name.to_string_lossy().into(), value.to_string_lossy().into()));
    let (configuration, wrong) = match Configuration::read(variables) {
        Ok(configuration) => (configuration, None),
        Err(wrong) => (Configuration { machine: Machine::h200().visible(&[]), log: None }, Some(wrong)),
    };
    let simulator = Simulator::new(configuration.machine);
    simulator.serve::<Library>();
    let mut is_first = false;
    let driver = DRIVER.get_or_init(|| {
        is_first = true;
        simulator
    });
    if is_first {
        if let Some(wrong) = wrong {
            log::say(&format!("{wrong}; there are no devices"));
        }
        if let Some(target) = configuration.log {
            log::write_at_exit(target);
        }
    }
    driver
}
