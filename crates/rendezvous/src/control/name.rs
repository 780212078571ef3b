//! Names of workers.

use tensorwire_fabric::Runtime;
use tensorwire_protocol::{DeviceName, limits::WORKER_NAME_BYTES_MAX, text::check_name};

/// The name of a task's worker, in replica 0.
pub(crate) fn task_name(job: &str, task: u32) -> String {
    format!("/job:{job}/replica:0/task:{task}")
}

/// The worker name in `text`: `/job:J/replica:R/task:T` unchanged, or the short form `J` for task 0 of the job J. So
/// every worker has one spelling of its name, and its devices can be used in keys.
///
/// # Errors
/// The remedy, if the text is not a worker name.
pub(crate) fn worker_name(text: &str) -> Result<String, String> {
    check_name(text)?;
    if text.len() > WORKER_NAME_BYTES_MAX {
        return Err(format!("a name has at most {WORKER_NAME_BYTES_MAX} bytes"));
    }
    let job = DeviceName::parse(&format!("/job:{text}")).ok().and_then(|parsed| parsed.job);
    if job.as_deref() == Some(text) {
        return Ok(task_name(text, 0));
    }
    let parsed = DeviceName::parse(text).ok();
    let (worker, device) = parsed.map(|parsed| (parsed.worker(), parsed.device_type)).unwrap_or_default();
    match (worker, device) {
        (Some(worker), _) if worker == text => Ok(worker),
        (Some(worker), Some(_)) => Err(format!("it is a device of a worker: write the worker's name, {worker}")),
        (Some(worker), None) => Err(format!("write it as {worker}")),
        (None, _) => Err(
            "write it like server or like /job:ps/replica:0/task:1; a short name or a job name has letters, digits, \
             underscores and hyphens, and begins with a letter"
                .to_owned(),
        ),
    }
}

/// Like [`worker_name`], but returns text that is not a worker name unchanged. No worker has such a name.
pub(crate) fn sought(text: &str) -> String {
    worker_name(text).unwrap_or_else(|_| text.to_owned())
}

/// A unique name for a worker that was given none.
pub(crate) fn client_name(runtime: &dyn Runtime) -> String {
    task_name(&format!("{CLIENT}{}_{:016x}", std::process::id(), runtime.random()), 0)
}

/// The beginning of the job names of workers that were given no name.
const CLIENT: &str = "client_";

/// Whether a worker with this name draws another one at each start. Such a name is a [`client_name`], or has a task
/// number that no job reaches: clients whose certificate is for all tasks of a job draw such numbers.
pub(crate) fn is_drawn(name: &str) -> bool {
    let Ok(DeviceName { job: Some(job), task: Some(task), .. }) = DeviceName::parse(name) else {
        return false;
    };
    let number = job.strip_prefix(CLIENT).and_then(|drawn| drawn.split_once('_'));
    let is_client = number.is_some_and(|(process, random)| {
        process.bytes().all(|byte| byte.is_ascii_digit()) && u64::from_str_radix(random, 16).is_ok()
    });
    is_client || task > u16::MAX.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_name_is_task_0_of_its_job_and_full_names_stay() {
        assert_eq!(worker_name("server").unwrap(), "/job:server/replica:0/task:0");
        assert_eq!(worker_name("Web_2").unwrap(), "/job:Web_2/replica:0/task:0");
        assert_eq!(worker_name("web-0").unwrap(), "/job:web-0/replica:0/task:0");
        for full in ["/job:server/replica:0/task:0", "/job:ps/replica:3/task:12", "/job:p-s/replica:0/task:0"]
        {
            assert_eq!(worker_name(full).unwrap(), full);
        }
    }

    #[test]
    fn names_that_are_drawn_at_each_start_are_known_by_their_form() {
        let drawn =
            ["/job:client_4711_9f86d081884c7d65/replica:0/task:0", "/job:pull/replica:0/task:1234567890"];
        assert!(drawn.into_iter().all(is_drawn));
        let given = [
            "/job:client/replica:0/task:0",
            "/job:client_of_mine/replica:0/task:0",
            "/job:ps/replica:0/task:7",
        ];
        assert!(!given.into_iter().any(is_drawn));
    }

    #[test]
    fn e_what_is_no_workers_name_is_told_what_to_write() {
        for (text, remedy) in [
            ("/job:ps/replica:0/task:0/device:CPU:0", "write the worker's name, /job:ps/replica:0/task:0"),
            ("/job:ps/replica:0/task:0/cpu:1", "write the worker's name, /job:ps/replica:0/task:0"),
            ("/task:1/job:ps/replica:0", "write it as /job:ps/replica:0/task:1"),
            ("/job:ps/replica:00/task:1", "write it as /job:ps/replica:0/task:1"),
            ("", "like server"),
            ("/", "like server"),
            ("*", "like server"),
            ("my.server", "letters, digits, underscores and hyphens"),
            ("-server", "begins with a letter"),
            ("2nd", "begins with a letter"),
            ("ps/task:0", "like server"),
            ("ps;worker", "like server"),
            ("/job:ps", "/job:ps/replica:0/task:1"),
            ("/job:*/replica:0/task:0", "like server"),
            ("/device:CPU:0", "like server"),
        ] {
            let problem = worker_name(text).unwrap_err();
            assert!(problem.contains(remedy), "{text}: {problem}");
            assert_eq!(sought(text), text);
        }
        let long = "n".repeat(WORKER_NAME_BYTES_MAX + 1);
        assert!(worker_name(&long).unwrap_err().contains("bytes"));
    }
}
