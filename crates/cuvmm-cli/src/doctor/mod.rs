//! `cuvmm doctor`: what works on this machine, tried out step by step, and what usually cures what does not.
//!
//! Every probe gives back what it made, also where a step fails; what a driver refuses to take back is told.

mod cure;
mod device;
mod driver;
mod host;
mod probe;
mod report;
#[cfg(test)]
mod tests;
mod trace;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use cuvmm::driver::{Hooked, Table};
use cuvmm::{Driver, Error, LoadError};
use cuvmm_sim::{Machine, Simulator};

use crate::flags::{Choice, Simulated};
use crate::report::line;
use host::Host;
use probe::Probe;
use report::{Report, Row, Section};
use trace::Trace;

/// Examines, prints, and says by its code whether virtual memory works on some device.
pub(crate) fn run(choice: Choice, machine: Option<Simulated>, json: bool) -> Result<ExitCode> {
    let report = match choice {
        Choice::Sim => simulated(machine.unwrap_or_default())?,
        // The simulator says nothing of this machine: it is examined where it was asked for, never in a GPU's place.
        Choice::Auto | Choice::Cuda => system(),
    };
    line(&if json { report.json() } else { report.text() })?;
    Ok(if report.works() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn simulated(machine: Simulated) -> Result<Report> {
    let simulator = Simulator::new((machine.model)());
    let trace = Trace::default();
    let driver = Driver::new(Hooked::new(simulator.clone(), trace.clone()))
        .map_err(Error::from)
        .context("the simulated driver does not start")?;
    let nodes = nodes_of(simulator.machine());
    let mut sections = examine(&driver, &trace, None, &nodes);
    sections.push(Host::read(Path::new("/")).section(false));
    let subject = format!("the simulated machine `{machine}`: no GPU is used, and nothing is said of one");
    Ok(Report { driver: "sim", subject, sections })
}

/// The nodes of a simulated host.
fn nodes_of(machine: &Machine) -> Vec<i32> {
    let nodes: Vec<i32> = machine.numa_nodes.iter().map(|node| node.id).collect();
    if nodes.is_empty() { vec![0] } else { nodes }
}

fn system() -> Report {
    let trace = Trace::default();
    let driver = load(&trace);
    // After the driver was loaded, which says where its library is and may have made its device nodes.
    let host = Host::read(Path::new("/"));
    let mut sections = match &driver {
        Ok(driver) => examine(driver, &trace, Some(&host), &host.nodes),
        Err(error) => vec![driver::failed(error, &host)],
    };
    sections.push(host.section(true));
    Report { driver: "cuda", subject: "this machine, by the CUDA driver that the loader finds".to_owned(), sections }
}

/// The system's driver, with a trace in front of it.
fn load(trace: &Trace) -> Result<Driver, LoadError> {
    Ok(Driver::new(Hooked::new(Table::load()?, trace.clone()))?)
}

/// The sections about a driver that runs. `library` is none for the simulator.
fn examine(driver: &Driver, trace: &Trace, library: Option<&Host>, nodes: &[i32]) -> Vec<Section> {
    let probe = Probe { driver, trace };
    let mut sections = vec![driver::section(&probe, library)];
    sections.extend(driver.devices().iter().map(|device| device::section(&probe, device)));
    sections.push(driver::host_memory(&probe, nodes));
    sections.push(Section { id: "after".into(), title: "afterwards".into(), rows: vec![left_behind(driver)] });
    sections
}

/// What the probes could not give back.
fn left_behind(driver: &Driver) -> Row {
    let (id, title) = ("left_behind", "left behind");
    match driver.stranded().total() {
        0 => Row::fact(id, title, "nothing"),
        left => Row::warning(
            id,
            title,
            format!("{left} that the driver refused to take back"),
            "it goes when this process ends",
        ),
    }
    .value(driver.stranded().total())
}
