//! The one driver of the process.

use std::sync::LazyLock;

use cuvmm_driver::{RawDriver, Served};
use cuvmm_sim::{Machine, Simulator};

use crate::configuration::Configuration;
use crate::log;

/// The driver, made at the first call as the environment says.
static DRIVER: LazyLock<Simulator> = LazyLock::new(start);

/// Serves the one driver.
pub(crate) struct Library;

impl Served for Library {
    fn served() -> &'static dyn RawDriver {
        &*DRIVER
    }
}

/// The driver itself.
pub(crate) fn driver() -> &'static Simulator {
    &DRIVER
}

fn start() -> Simulator {
    let variables = std::env::vars_os();
    let variables = variables.map(|(name, value)| (name.to_string_lossy().into(), value.to_string_lossy().into()));
    let configuration = Configuration::read(variables).unwrap_or_else(|wrong| {
        log::say(&format!("{wrong}; there are no devices"));
        Configuration { machine: Machine::h200().visible(&[]), log: None }
    });
    let simulator = Simulator::new(configuration.machine);
    simulator.serve::<Library>();
    if let Some(target) = configuration.log {
        log::write_at_exit(target);
    }
    simulator
}
