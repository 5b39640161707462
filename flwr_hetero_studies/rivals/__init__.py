"""Published methods that ours are raced against, for studies."""

from flwr_hetero_studies.rivals.adacomm import AdaComm
from flwr_hetero_studies.rivals.asgd import FedAsync, RescaledASGD, RingleaderASGD
from flwr_hetero_studies.rivals.fedat import FedAT
from flwr_hetero_studies.rivals.fedcompass import FedCompass
from flwr_hetero_studies.rivals.fednova import FedNova
from flwr_hetero_studies.rivals.oort import Oort
from flwr_hetero_studies.rivals.over_select import OverSelect
from flwr_hetero_studies.rivals.power_of_choice import PowerOfChoice
from flwr_hetero_studies.rivals.timed import DeadlineSelection, WithoutSlowest

__all__ = ["AdaComm", "DeadlineSelection", "FedAT", "FedAsync", "FedCompass", "FedNova", "Oort",
           "OverSelect", "PowerOfChoice", "RescaledASGD", "RingleaderASGD",
           "WithoutSlowest"]  # fmt: skip
