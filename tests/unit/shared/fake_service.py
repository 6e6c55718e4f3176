"""A service for the supervisor's tests: healthy at once, until a signal comes or it is told to fail.

Usage: fake_service.py PORT HEALTH_NAME [refuse | stubborn]
"""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> int:
    port, name, *how = sys.argv[1:]
    sys.stdout.write("loading\n")
    if how == ["refuse"]:
        sys.stderr.write("The model is not there: prepare it.\n")
        return 2
    signals = {signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    number = signal.sigwait(signals)
    while how == ["stubborn"] and number == signal.SIGTERM:
        number = signal.sigwait(signals)
    sys.stdout.write(f"leaving after {signal.Signals(number).name}\n")
    sys.stdout.flush()
    server.stop(None).wait()
    return 0 if number == signal.SIGTERM else 3


if __name__ == "__main__":
    sys.exit(main())
