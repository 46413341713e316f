//! What the environment says: the README has the table.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cuvmm_driver::sys::CUuuid;
use cuvmm_sim::{Latency, Machine, Preset};

use crate::log::Target;

/// What every variable of this library begins with.
const PREFIX: &str = "CUVMM_SIM_";
/// The real driver's own variable: the devices that the process sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The machine to simulate, and where the log goes.
#[derive(Debug)]
pub(crate) struct Configuration {
    pub(crate) machine: Machine,
    pub(crate) log: Option<Target>,
}

impl Configuration {
    /// Reads the variables that concern this library, or says which one is wrong.
    pub(crate) fn read(variables: impl Iterator<Item = (String, String)>) -> Result<Self, String> {
        let mut variables: BTreeMap<String, String> = variables.collect();
        let mut machine = match take(&mut variables, "MACHINE") {
            None => Machine::default(),
            Some(name) => Machine::named(&name).ok_or_else(|| wrong("MACHINE", &name))?,
        };
        if let Some(name) = take(&mut variables, "PRESET") {
            machine = machine.preset(preset(&name).ok_or_else(|| wrong("PRESET", &name))?);
        }
        if let Some(value) = take(&mut variables, "IMEX") {
            machine.imex = match value.as_str() {
                "0" => false,
                "1" => true,
                _ => return Err(wrong("IMEX", &value)),
            };
        }
        if let Some(name) = take(&mut variables, "LATENCY") {
            machine = machine.latency(latency(&name).ok_or_else(|| wrong("LATENCY", &name))?);
        }
        if let Some(text) = take(&mut variables, "DRIVER_VERSION") {
            machine = machine.driver_version(text.parse().map_err(|_| wrong("DRIVER_VERSION", &text))?);
        }
        if let Some(text) = take(&mut variables, "ATTRIBUTES") {
            let attributes = attributes(&text).ok_or_else(|| wrong("ATTRIBUTES", &text))?;
            for device in &mut machine.devices {
                device.attributes.extend(&attributes);
            }
        }
        let log = take(&mut variables, "LOG").map(|target| match target.as_str() {
            "stderr" => Target::Stderr,
            path => Target::File(PathBuf::from(path)),
        });
        if let Some(text) = variables.remove(VISIBLE) {
            let visible = visible(&machine, &text);
            machine = machine.visible(&visible);
        }
        match variables.keys().find(|name| name.starts_with(PREFIX)) {
            Some(name) => Err(format!("{name} is no variable of the simulated driver")),
            None => Ok(Self { machine, log }),
        }
    }
}

fn take(variables: &mut BTreeMap<String, String>, name: &str) -> Option<String> {
    variables.remove(&format!("{PREFIX}{name}"))
}

fn wrong(name: &str, value: &str) -> String {
    format!("{PREFIX}{name} cannot be {value:?}")
}

fn preset(name: &str) -> Option<Preset> {
    Some(match name {
        "strict" => Preset::Strict,
        "measured" => Preset::Measured,
        _ => return None,
    })
}

fn latency(name: &str) -> Option<Latency> {
    Some(match name {
        "h200" => Latency::h200(),
        "h200_pair" => Latency::h200_pair(),
        _ => return None,
    })
}

/// Numbers of attributes and their values: `115=0,41=1`.
fn attributes(text: &str) -> Option<BTreeMap<u32, i32>> {
    let pair = |pair: &str| {
        let (number, value) = pair.split_once('=')?;
        Some((number.trim().parse().ok()?, value.trim().parse().ok()?))
    };
    text.split(',').map(pair).collect()
}

/// The devices that a process with that CUDA_VISIBLE_DEVICES sees: up to the first name that is none's, and none where
/// one is named twice.
fn visible(machine: &Machine, text: &str) -> Vec<usize> {
    let find = |name: &str| match name.parse() {
        Ok(ordinal) => Some(ordinal).filter(|&ordinal: &usize| ordinal < machine.devices.len()),
        Err(_) if name.len() > "GPU-".len() => {
            machine.devices.iter().position(|device| uuid(device.uuid).starts_with(name))
        }
        Err(_) => None,
    };
    let found: Vec<usize> =
        text.split(',').map(|name| find(name.trim())).take_while(Option::is_some).flatten().collect();
    let twice = found.iter().enumerate().any(|(index, ordinal)| found[..index].contains(ordinal));
    if twice { Vec::new() } else { found }
}

/// A device's identity as the variable has it: `GPU-01234567-89ab-cdef-0123-456789abcdef`.
fn uuid(uuid: CUuuid) -> String {
    let hex: String = uuid.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Configuration, String> {
        Configuration::read(variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())))
    }

    #[test]
    fn nothing_said_is_one_strict_h200_without_a_log() {
        let configuration = read(&[("PATH", "/bin")]).unwrap();
        let default = Machine::h200();
        assert_eq!(configuration.machine.preset, Preset::Strict);
        assert_eq!(configuration.machine.devices.len(), 1);
        assert_eq!(configuration.machine.devices[0].total_memory, default.devices[0].total_memory);
        assert_eq!(configuration.log, None);
    }

    #[test]
    fn each_variable_changes_what_it_names() {
        let configuration = read(&[
            ("CUVMM_SIM_MACHINE", "h200_pair"),
            ("CUVMM_SIM_PRESET", "measured"),
            ("CUVMM_SIM_IMEX", "1"),
            ("CUVMM_SIM_LATENCY", "h200"),
            ("CUVMM_SIM_DRIVER_VERSION", "12020"),
            ("CUVMM_SIM_ATTRIBUTES", "115=0, 41=7"),
            ("CUVMM_SIM_LOG", "/tmp/log"),
        ])
        .unwrap();
        let machine = configuration.machine;
        assert_eq!((machine.preset, machine.driver_version.0), (Preset::Measured, 12020));
        assert_eq!((machine.devices.len(), machine.imex, machine.latency.is_some()), (2, true, true));
        for device in machine.devices {
            assert_eq!((device.attributes[&115], device.attributes[&41], device.attributes[&75]), (0, 7, 9));
        }
        assert_eq!(configuration.log, Some(Target::File("/tmp/log".into())));
        assert_eq!(read(&[("CUVMM_SIM_LOG", "stderr")]).unwrap().log, Some(Target::Stderr));
        assert_eq!(read(&[("CUVMM_SIM_MACHINE", "small")]).unwrap().machine.devices[0].total_memory, 1 << 30);
        assert!(!read(&[("CUVMM_SIM_MACHINE", "odd"), ("CUVMM_SIM_IMEX", "0")]).unwrap().machine.imex);
    }

    #[test]
    fn a_wrong_value_is_named() {
        let check = |name: &str, value: &str, expect: &str| assert_eq!(read(&[(name, value)]).unwrap_err(), expect);
        check("CUVMM_SIM_MACHINE", "h300", "CUVMM_SIM_MACHINE cannot be \"h300\"");
        check("CUVMM_SIM_PRESET", "Strict", "CUVMM_SIM_PRESET cannot be \"Strict\"");
        check("CUVMM_SIM_IMEX", "yes", "CUVMM_SIM_IMEX cannot be \"yes\"");
        check("CUVMM_SIM_LATENCY", "on", "CUVMM_SIM_LATENCY cannot be \"on\"");
        check("CUVMM_SIM_DRIVER_VERSION", "13.0", "CUVMM_SIM_DRIVER_VERSION cannot be \"13.0\"");
        check("CUVMM_SIM_ATTRIBUTES", "115", "CUVMM_SIM_ATTRIBUTES cannot be \"115\"");
        check("CUVMM_SIM_DEVICES", "2", "CUVMM_SIM_DEVICES is no variable of the simulated driver");
    }

    #[test]
    fn devices_are_seen_as_the_drivers_variable_says() {
        let names: Vec<String> = Machine::h200_pair().devices.iter().map(|device| uuid(device.uuid)).collect();
        assert_eq!(names[1], "GPU-6375766d-6d2d-7369-6d2f-683230302f01");
        let check = |text: &str, expect: &[usize]| assert_eq!(visible(&Machine::h200_pair(), text), expect, "{text}");
        check("0,1", &[0, 1]);
        check("1, 0", &[1, 0]);
        check("1", &[1]);
        check("", &[]);
        check("-1", &[]);
        check("1,7,0", &[1]);
        check("0,0", &[]);
        check(&names[1], &[1]);
        check("GPU-", &[]);
    }
}
