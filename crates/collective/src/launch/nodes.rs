//! The address of the store in a Slurm job.

use super::{LaunchError, variables::Variables};
use crate::store::StoreUrl;

/// The ports computed from a job: below the range from which operating systems assign ports.
const PORT_MIN: u16 = 20_000;
const PORTS: u64 = 10_000;

/// Slurm gives nodes, but no port. The node from which a job was launched may not be the node of rank 0.
pub(super) fn slurm(variables: Variables<'_>) -> Result<Option<StoreUrl>, LaunchError> {
    let host = match first_of_list(variables)? {
        Some(host) => Some(host),
        None => variables.get("SLURM_LAUNCH_NODE_IPADDR"),
    };
    let (Some(host), Some(job)) = (host, number(variables, "SLURM_JOB_ID")) else { return Ok(None) };
    Ok(Some(StoreUrl::tcp(&host, port(job, number(variables, "SLURM_STEP_ID").unwrap_or(0)))))
}

/// Whether the step, or else the job, has one node.
pub(super) fn is_one(variables: Variables<'_>) -> Option<bool> {
    ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"].iter().find_map(|name| Some(number(variables, name)? == 1))
}

/// `None` if the variable is not a number: then other variables give the store.
fn number(variables: Variables<'_>, name: &str) -> Option<u64> {
    variables.get(name)?.parse().ok()
}

/// Different for jobs that follow each other, and for the steps of a job.
fn port(job: u64, step: u64) -> u16 {
    let offset = job.wrapping_add(step.wrapping_mul(101)) % PORTS;
    // Below 10,000.
    PORT_MIN + offset as u16
}

fn first_of_list(variables: Variables<'_>) -> Result<Option<String>, LaunchError> {
    for variable in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
        let Some(value) = variables.get(variable) else { continue };
        let remedy =
            || "it is not a list of nodes such as `node[01-04,7],other`; set TENSORWIRE_STORE".to_owned();
        return match first_node(&value) {
            Some(node) => Ok(Some(node)),
            None => Err(LaunchError::BadAddress { variable, value, remedy: remedy() }),
        };
    }
    Ok(None)
}

/// The first node of a list: its text up to the first comma, with the first number of each bracket.
fn first_node(list: &str) -> Option<String> {
    let (mut node, mut rest) = (String::new(), list);
    loop {
        let Some(at) = rest.find(['[', ']', ',']) else {
            node.push_str(rest);
            break;
        };
        node.push_str(&rest[..at]);
        let (mark, after) = rest[at..].split_at(1);
        match mark {
            "," => break,
            "]" => return None,
            _ => {
                let (numbers, after) = after.split_once(']')?;
                let first = numbers.split([',', '-']).next()?;
                if first.is_empty() || !first.bytes().all(|digit| digit.is_ascii_digit()) {
                    return None;
                }
                node.push_str(first);
                rest = after;
            }
        }
    }
    (!node.is_empty()).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_node_of_a_list_has_the_first_number_of_each_bracket() {
        let taken = [
            ("node7", "node7"),
            ("a,b", "a"),
            ("node[01-04,7],gpu-3", "node01"),
            ("node[8]", "node8"),
            ("gpu-a-[003,005-9]", "gpu-a-003"),
            ("rack[1-2]n[03-4]-ib,x[1-2]", "rack1n03-ib"),
            ("[10-12]", "10"),
            ("nid00012.cluster.example", "nid00012.cluster.example"),
        ];
        for (list, first) in taken {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        for refused in ["", ",a", "node[", "node[1-2", "node]1[", "node[]", "node[-2]", "node[a-b]", "a[1]]"]
        {
            assert_eq!(first_node(refused), None, "{refused}");
        }
    }

    #[test]
    fn a_port_follows_from_the_job_and_the_step() {
        assert_eq!(port(4_242_123, 0), 22_123);
        assert_ne!(port(4_242_123, 1), port(4_242_123, 0));
        assert_ne!(port(4_242_124, 0), port(4_242_123, 0));
        assert!((PORT_MIN..30_000).contains(&port(u64::MAX, u64::MAX)));
    }
}
