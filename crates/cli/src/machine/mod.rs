//! Facts about the machine for `tensorwire devices` and `tensorwire doctor`, without judgement.

mod device;
mod library;
mod memory;
mod node;
mod process;
mod surroundings;
#[cfg(test)]
pub(crate) mod tests;
mod tree;

use std::sync::Arc;

use tensorwire_fabric::Runtime;

#[cfg(test)]
pub(crate) use device::Paging;
pub(crate) use device::{Address, AddressKind, Device, Interface, Limits, Port};
pub(crate) use library::{Choice, Library, open_fabric};
pub(crate) use memory::MemoryFacts;
pub(crate) use node::{Node, NodeAccess};
pub(crate) use process::{MemoryLock, ProcessFacts};
pub(crate) use surroundings::Surroundings;
pub(crate) use tree::Tree;

/// All facts that can be read without a transfer over a device.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    /// libibverbs.
    pub(crate) library: Library,
    /// The kernel's devices.
    pub(crate) devices: Vec<Device>,
    /// The device that Tensorwire would use, or the reason to use none.
    pub(crate) choice: Result<Choice, String>,
    /// The kernel, and the surroundings of this process.
    pub(crate) surroundings: Surroundings,
    /// This process.
    pub(crate) process: ProcessFacts,
    /// Huge pages, and memory of other devices.
    pub(crate) memory: MemoryFacts,
}

impl Machine {
    /// Examines this machine. `device` narrows the choice to one.
    pub(crate) fn look(device: Option<&str>, runtime: Arc<dyn Runtime>) -> Self {
        let library = Library::look();
        let mut machine = Self::read(&Tree::of_this_machine(), library);
        for known in &mut machine.devices {
            known.ask_library();
        }
        machine.choice = library::choose(device, runtime);
        machine
    }

    /// The facts in files, without a choice.
    fn read(tree: &Tree, library: Library) -> Self {
        Self {
            library,
            devices: device::read_all(tree),
            choice: Err("nothing has been looked for".to_owned()),
            surroundings: Surroundings::read(tree),
            process: ProcessFacts::read(tree),
            memory: MemoryFacts::read(tree),
        }
    }
}
